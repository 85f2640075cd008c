"""Lightning and Fabric over tiers: modules and loops as they are, the resident run's bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support_integrations import batches, decoder
from torch import Tensor, nn

lightning = pytest.importorskip("lightning")

from tiermem.integrations.lightning import FabricTierStrategy, TierStrategy  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # the library's own

BUDGETS: dict[str, Any] = {"device": "cpu", "hbm": "700KiB", "dram": "16MiB"}
STEPS = 4


class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
    """A module as people write them: it knows nothing of tiers."""

    def __init__(self) -> None:
        super().__init__()
        self.model = decoder(6)
        self.losses: list[float] = []

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss: Tensor = self.model(batch)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Tensor, index: int) -> None:
        self.log("val_loss", self.model(batch))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3, weight_decay=0.1)
        warm = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=2)
        slow = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, slow], [2])
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


def loader(steps: int) -> Any:
    return torch.utils.data.DataLoader(list(batches(steps)), batch_size=None)  # type: ignore[arg-type]


def trainer(folder: Path, **settings: Any) -> Any:
    return lightning.Trainer(
        **{
            "default_root_dir": folder,
            "max_steps": STEPS,
            "logger": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "enable_checkpointing": False,
            "gradient_clip_val": 0.5,
            **settings,
        }
    )


def fit(folder: Path, strategy: Any = None, path: str | None = None, **settings: Any) -> Module:
    module = Module()
    where = {"accelerator": "cpu"} if strategy is None else {"strategy": strategy}
    trainer(folder, **where, **settings).fit(module, loader(8), loader(2), ckpt_path=path)
    return module


def same(one: nn.Module, other: nn.Module) -> bool:
    a, b = one.state_dict(), other.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name].cpu()) for name in a)


@pytest.mark.parametrize(
    "settings",
    [{}, {"accumulate_grad_batches": 2}, {"precision": "bf16-mixed"}],
    ids=lambda settings: "-".join(settings) or "plain",
)
def test_fitting_gives_the_resident_runs_bits(tmp_path: Path, settings: dict[str, Any]) -> None:
    expected = fit(tmp_path, **settings)
    strategy = TierStrategy(**BUDGETS)
    found = fit(tmp_path, strategy, **settings)
    assert found.losses == expected.losses
    assert same(expected, found)  # an ordinary model again, after fit
    assert strategy.tier is not None and strategy.tier.closed


def test_moving_happens() -> None:
    strategy = TierStrategy(**BUDGETS)
    seen: list[int] = []

    class Looking(lightning.Callback):  # type: ignore[misc, name-defined]
        def on_train_end(self, *_: Any) -> None:
            assert strategy.tier is not None
            seen.append(strategy.tier.stats().links["dram->hbm"].nbytes)

    fit(Path(), strategy, callbacks=[Looking()])
    assert seen and seen[0] > 0


def test_checkpoints_resume_either_way(tmp_path: Path) -> None:
    half = {"max_steps": 2, "enable_checkpointing": True}
    fit(tmp_path / "resident", **half)
    fit(tmp_path / "tiered", TierStrategy(**BUDGETS), **half)
    saved = {name: next((tmp_path / name).rglob("*.ckpt")) for name in ("resident", "tiered")}
    expected = fit(tmp_path, path=str(saved["resident"]))
    assert len(expected.losses) == STEPS - 2
    for name, strategy in (("tiered", None), ("resident", TierStrategy(**BUDGETS))):
        found = fit(tmp_path, strategy, str(saved[name]))
        assert found.losses == expected.losses
        assert same(expected, found)


def test_validating_alone(tmp_path: Path) -> None:
    module, data = Module(), loader(2)
    expected = trainer(tmp_path, accelerator="cpu").validate(module, data, verbose=False)
    found = trainer(tmp_path, strategy=TierStrategy(**BUDGETS)).validate(
        module, data, verbose=False
    )
    assert found == expected


def fabric_losses(fabric: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    model, optimizer = fabric.setup(model, optimizer)
    losses = []
    for tokens in batches(STEPS):
        loss = model(tokens)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_fabric() -> None:
    model = decoder(6)
    plain = torch.optim.AdamW(model.parameters(), lr=1e-3)
    expected = fabric_losses(lightning.Fabric(accelerator="cpu"), model, plain)
    model = decoder(6)
    strategy = FabricTierStrategy(**BUDGETS)
    losses = fabric_losses(
        lightning.Fabric(strategy=strategy), model, torch.optim.AdamW(model.parameters(), lr=1e-3)
    )
    assert losses == expected
    assert strategy.tier is not None
    assert strategy.tier.stats().links["dram->hbm"].nbytes > 0
    strategy.tier.close()
