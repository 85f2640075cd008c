"""Trains one model with a trainer of transformers in several processes, resident and tiered.

Run as a program it is one of them: ``support_two_trainers.py RANK PROCESSES FILE``, and with
``cuda`` behind it each has a GPU of its own.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support_nn import assert_same
from support_trainers import arguments
from torch import Tensor

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated": {"gradient_accumulation_steps": 2, "max_grad_norm": 0.1, "attach": True},
    "recomputed": {"gradient_checkpointing": True, "ddp_find_unused_parameters": False},
}
LAYERS = 4


class Sentences(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Token ids, the same ones each time."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.randint(64, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def llama(width: int, rank: int) -> Any:
    """Returns a model; processes begin with different weights, of which the first one's count."""
    import transformers

    transformers.set_seed(rank)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    return transformers.LlamaForCausalLM(config)


def trained(folder: Path, budgets: dict[str, Any] | None, **settings: Any) -> dict[str, Tensor]:
    """Trains and evaluates, resident or with budgets.

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
    model = llama(64 if on_host else 512, dist.get_rank())
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


def main() -> None:
    """Runs every case as one of several processes."""
    rank, processes, file = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    cuda = "cuda" in sys.argv[4:]
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(processes),
        LOCAL_WORLD_SIZE=str(processes),
        HF_HUB_OFFLINE="1",
    )
    torch.set_num_threads(1)
    if cuda:
        torch.cuda.set_device(rank)
        torch.use_deterministic_algorithms(True)
    backend = "nccl" if cuda else "gloo"
    dist.init_process_group(backend, init_method=f"file://{file}", rank=rank, world_size=processes)
    budgets = {"hbm": "24MiB", "dram": "512MiB"} if cuda else {"hbm": "400KiB", "dram": "16MiB"}
    for case, settings in CASES.items():
        folder = Path(file).parent / f"{case}{rank}"
        expected = trained(folder / "resident", None, **settings)
        found = trained(folder / "tiers", budgets, **settings)
        assert_same(expected, found, case)
        print("equal", flush=True)
    sys.stdout.flush()
    os._exit(0)  # threads of the backend may outlive the other process


if __name__ == "__main__":
    main()
