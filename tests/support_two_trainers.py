"""Trains a model with others' trainers in several processes, resident and tiered.

Run as a program it is one of them: ``support_two_trainers.py LIBRARY RANK PROCESSES FILE``, and
with ``cuda`` behind it each has a GPU of its own.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support_nn import assert_same
from support_trainers import Sentences, arguments, llama
from torch import Tensor

HUGGING_FACE: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated": {"gradient_accumulation_steps": 2, "max_grad_norm": 0.1, "attach": True},
    "recomputed": {"gradient_checkpointing": True, "ddp_find_unused_parameters": False},
}
LIGHTNING: dict[str, dict[str, Any]] = {
    "clipped": {"gradient_clip_val": 0.5},
    "accumulated": {"accumulate_grad_batches": 2},
    "fabric": {},
}


def model_of(on_host: bool) -> Any:
    """Returns a model; processes begin with different weights, of which the first one's count."""
    return llama(dist.get_rank(), 64 if on_host else 512)


def trained_by_transformers(
    folder: Path, budgets: dict[str, Any] | None, **settings: Any
) -> dict[str, Tensor]:
    """Trains and evaluates with a ``Trainer``, resident or with budgets.

    Args:
        folder: Of the trainer; of this process alone.
        budgets: Of the tiers; None for a resident model.
        settings: Of the trainer's arguments; ``attach`` for the other way to have tiers.

    Returns:
        What was logged, and the weights.
    """
    import transformers

    from tiermem.integrations.hugging_face import TrainerTiers

    attach = settings.pop("attach", False)
    on_host = dist.get_backend() == "gloo"
    evaluating = {"eval_strategy": "steps", "eval_steps": 2}
    args = arguments(folder, use_cpu=on_host, **evaluating, **settings)
    data = Sentences()
    model = model_of(on_host)
    given = {"train_dataset": data, "eval_dataset": data}
    if budgets is None:
        trainer = transformers.Trainer(model, args, **given)
        trainer.train()
        return seen(trainer)
    with TrainerTiers(args.device, **budgets) as tier:
        if attach:
            trainer = transformers.Trainer(model, args, **given)
            tier.attach(trainer)
        else:
            optimizers = tier.optimizers(model, args)
            trainer = transformers.Trainer(model, args, optimizers=optimizers, **given)
        trainer.train()
        return seen(trainer)


def seen(trainer: Any) -> dict[str, Tensor]:
    """Returns what a trainer logged, but for times, and its weights in host memory."""
    keys = ("loss", "grad_norm", "learning_rate", "eval_loss")
    rows = [[float(row.get(key, -1)) for key in keys] for row in trainer.state.log_history][:-1]
    weights = {name: value.cpu() for name, value in trainer.model.state_dict().items()}
    return {"logged": torch.tensor(rows, dtype=torch.float64), **weights}


def trained_by_lightning(
    folder: Path, budgets: dict[str, Any] | None, **settings: Any
) -> dict[str, Tensor]:
    """Trains with Lightning's ``Trainer`` or with Fabric; arguments and result as above."""
    import lightning
    from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy
    from lightning.pytorch.strategies import DDPStrategy

    from tiermem.integrations.lightning import FabricTierDDPStrategy, TierDDPStrategy

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        """A module as people write them: it knows nothing of tiers."""

        def __init__(self, model: Any) -> None:
            super().__init__()
            self.model = model
            self.losses: list[Tensor] = []

        def training_step(self, batch: Any, index: int) -> Tensor:
            loss: Tensor = self.model(**batch).loss
            self.losses.append(loss.detach().cpu())
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3, weight_decay=0.1)

    on_host = dist.get_backend() == "gloo"
    where = {"accelerator": "cpu" if on_host else "cuda", "devices": dist.get_world_size()}
    loader = torch.utils.data.DataLoader(Sentences(), batch_size=2)
    module = Module(model_of(on_host))
    if folder.parent.name.startswith("fabric"):
        other = FabricDDPStrategy() if budgets is None else FabricTierDDPStrategy(**budgets)
        fabric = lightning.Fabric(strategy=other, **where)
        fabric.launch()
        model, optimizer = fabric.setup(module, module.configure_optimizers())
        model.mark_forward_method("training_step")
        for index, batch in enumerate(fabric.setup_dataloaders(loader)):
            fabric.backward(model.training_step(batch, index))
            fabric.clip_gradients(model, optimizer, max_norm=0.5)
            optimizer.step()
            optimizer.zero_grad()
    else:
        chosen = DDPStrategy() if budgets is None else TierDDPStrategy(**budgets)
        quiet = dict.fromkeys(
            ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False
        )
        trainer = lightning.Trainer(
            default_root_dir=folder, max_steps=4, strategy=chosen, **where, **quiet, **settings
        )
        trainer.fit(module, loader)
    weights = {name: value.cpu() for name, value in module.state_dict().items()}
    return {"losses": torch.stack(module.losses), **weights}


def main() -> None:
    """Runs every case as one of several processes."""
    library, rank, processes, file = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    cuda = "cuda" in sys.argv[5:]
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(processes),
        LOCAL_WORLD_SIZE=str(processes),
        NODE_RANK="0",
        MASTER_ADDR="127.0.0.1",  # for programs that ask; the processes meet in a file
        MASTER_PORT="29500",
        TORCHELASTIC_RUN_ID="tests",
        HF_HUB_OFFLINE="1",
    )
    torch.set_num_threads(1)
    if cuda:
        torch.cuda.set_device(rank)
        torch.use_deterministic_algorithms(True)
    backend = "nccl" if cuda else "gloo"
    dist.init_process_group(backend, init_method=f"file://{file}", rank=rank, world_size=processes)
    budgets = {"hbm": "24MiB", "dram": "512MiB"} if cuda else {"hbm": "400KiB", "dram": "16MiB"}
    hugging_face = library == "transformers"
    trained = trained_by_transformers if hugging_face else trained_by_lightning
    for case, settings in (HUGGING_FACE if hugging_face else LIGHTNING).items():
        folder = Path(file).parent / f"{case}{rank}"
        expected = trained(folder / "resident", None, **settings)
        found = trained(folder / "tiers", budgets, **settings)
        assert_same(expected, found, case)
        print("equal", flush=True)
    sys.stdout.flush()
    os._exit(0)  # threads of the backend may outlive the other process


if __name__ == "__main__":
    main()
