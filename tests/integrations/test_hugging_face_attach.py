"""Trainers that make optimizers of their own: ``tier.attach`` gives theirs, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import support_trainers
import torch
from torch import Tensor, nn

import tiermem
from tiermem.integrations.hugging_face import TrainerTiers

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

pytestmark = pytest.mark.filterwarnings("ignore")  # those libraries' own

BUDGETS: dict[str, Any] = {"device": "cpu", "hbm": "24KiB", "dram": "16MiB"}
WIDTH = 32


class Encoder(nn.Module):
    """Layers in a row; what it gives is for a loss that has weights of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(8)])

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


class Classified(nn.Module):
    """A loss with a head, around the model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.model(inputs["x"])), inputs["labels"])


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))
        return {"x": row, "labels": torch.tensor(index % 3)}


class Trainer(transformers.Trainer):  # type: ignore[misc, name-defined]
    """Trains its loss, too, and nothing at the rate that the arguments say."""

    def __init__(self, model: nn.Module, args: Any, **more: Any) -> None:
        super().__init__(model, args, train_dataset=Rows(), **more)
        torch.manual_seed(1)
        self.loss = Classified(model)

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **more: Any) -> Tensor:
        return self.loss(inputs)  # type: ignore[no-any-return]

    def get_optimizer_cls_and_kwargs(self, args: Any, model: Any = None) -> tuple[Any, Any]:  # type: ignore[override, unused-ignore]
        cls, settings = super().get_optimizer_cls_and_kwargs(args, self.loss)
        groups = [
            {"params": [p for n, p in self.loss.named_parameters() if ("head" in n) is head]}
            for head in (False, True)
        ]
        groups[1]["lr"] = 0.05  # type: ignore[assignment]
        return cls, {**settings, "params": groups}


class ByHand(Trainer):
    """Makes its optimizer in full."""

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            self.optimizer = torch.optim.SGD(self.loss.parameters(), lr=0.1, momentum=0.9)
        return self.optimizer  # type: ignore[no-any-return]


def encoder() -> Encoder:
    torch.manual_seed(0)
    return Encoder()


def arguments(folder: Path, **settings: Any) -> Any:
    more = {"per_device_train_batch_size": 4, "remove_unused_columns": False}
    return support_trainers.arguments(folder, **{**more, **settings})


def seen(trainer: Any) -> tuple[list[Any], dict[str, Tensor]]:
    """Returns what was logged, but for times, and all weights."""
    rows = [(row.get("loss"), row.get("grad_norm")) for row in trainer.state.log_history]
    return rows, {name: value.clone() for name, value in trainer.loss.state_dict().items()}


def same(one: tuple[list[Any], dict[str, Tensor]], other: tuple[list[Any], Any]) -> bool:
    return one[0] == other[0] and all(torch.equal(one[1][n], other[1][n]) for n in one[1])


@pytest.mark.parametrize("kind", [Trainer, ByHand])
def test_a_trained_loss_and_groups_of_the_trainers_own(kind: Any, tmp_path: Path) -> None:
    args = arguments(tmp_path)
    plain = kind(encoder(), args)
    plain.train()
    with TrainerTiers(**BUDGETS) as tier:
        trainer = kind(encoder(), args)
        optimizer = tier.attach(trainer)
        assert trainer.optimizer is optimizer
        trainer.train()
        assert same(seen(trainer), seen(plain))
        assert tier.stats().links["dram->hbm"].nbytes > 0


@pytest.mark.parametrize("kind", [Trainer, ByHand])
def test_what_arguments_alone_do_not_say_is_refused(kind: Any, tmp_path: Path) -> None:
    """The head of the loss would not be trained, and nobody would be told."""
    args, model = arguments(tmp_path), encoder()
    with TrainerTiers(**BUDGETS) as tier:
        trainer = kind(model, args, optimizers=tier.optimizers(model, args))
        with pytest.raises(tiermem.ConfigError, match=kind.__name__ + r" makes.*tier\.attach"):
            trainer.train()
        with pytest.raises(tiermem.ConfigError, match="has a tiered optimizer already"):
            tier.attach(trainer)


def test_ways_of_its_own_that_give_the_same_are_taken(tmp_path: Path) -> None:
    class Same(Trainer):
        def get_optimizer_cls_and_kwargs(self, args: Any, model: Any = None) -> tuple[Any, Any]:  # type: ignore[override, unused-ignore]
            return transformers.Trainer.get_optimizer_cls_and_kwargs(args, model)  # type: ignore[no-any-return]

    args, model = arguments(tmp_path), encoder()
    plain = Same(encoder(), args)
    plain.train()
    with TrainerTiers(**BUDGETS) as tier:
        trainer = Same(model, args, optimizers=tier.optimizers(model, args))
        trainer.train()
        assert same(seen(trainer), seen(plain))


def test_the_loss_may_be_wrapped_around_the_model(tmp_path: Path) -> None:
    args = arguments(tmp_path)
    plain = Trainer(encoder(), args)
    plain.train()
    with TrainerTiers(**BUDGETS) as tier:
        trainer = Trainer(encoder(), args)
        tier.wrap(trainer.loss)
        tier.attach(trainer)
        trainer.train()
        assert same(seen(trainer), seen(plain))


def test_an_optimizer_and_a_scheduler_that_the_program_made(tmp_path: Path) -> None:
    args = arguments(tmp_path)

    def made(model: nn.Module) -> Any:
        optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
        rates = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return Trainer(model, args, optimizers=(optimizer, rates))

    plain = made(encoder())
    plain.train()
    with TrainerTiers(**BUDGETS) as tier:
        trainer = made(encoder())
        tier.attach(trainer)
        trainer.train()
        assert same(seen(trainer), seen(plain))
        assert trainer.optimizer.param_groups[0]["lr"] == plain.optimizer.param_groups[0]["lr"]


def test_another_class_and_a_class_that_has_its_state_at_once(tmp_path: Path) -> None:
    args = arguments(tmp_path, optim="adagrad")
    with TrainerTiers(**BUDGETS) as tier:
        optimizer = tier.attach(Trainer(encoder(), args))
        assert "Adagrad" in repr(optimizer)
        assert [group["lr"] for group in optimizer.param_groups] == [1e-3, 0.05]
        optimizer.close()
        optimizer = tier.attach(Trainer(encoder(), args), torch.optim.SGD, lr=0.1)
        assert "SGD" in repr(optimizer)
        assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.05]


def test_what_cannot_be_attached_is_refused(tmp_path: Path) -> None:
    class FromModel(Trainer):
        def get_optimizer_cls_and_kwargs(self, args: Any, model: Any = None) -> tuple[Any, Any]:  # type: ignore[override, unused-ignore]
            return torch.optim.SGD, {"model": model}

    args = arguments(tmp_path)
    with TrainerTiers(**BUDGETS) as tier:
        with pytest.raises(tiermem.ConfigError, match="from the whole model"):
            tier.attach(FromModel(encoder(), args))
        trainer = Trainer(encoder(), args)
        trainer.args.optim = "galore_adamw_layerwise"
        with pytest.raises(tiermem.ConfigError, match="without layerwise"):
            tier.attach(trainer)
        trainer.args.optim = "adamw_torch"
        trainer.model_init = encoder  # as train() begins, that makes the model anew
        with pytest.raises(tiermem.ConfigError, match="model_init= has the trainer make another"):
            tier.attach(trainer)


def test_a_trainer_that_has_trained_is_refused(tmp_path: Path) -> None:
    trainer = Trainer(encoder(), arguments(tmp_path))
    with TrainerTiers(**BUDGETS) as tier:
        optimizer = tier.attach(trainer)
        trainer.train()
        with pytest.raises(tiermem.ConfigError, match="has a tiered optimizer already"):
            tier.attach(trainer)
        optimizer.close()
    trainer = Trainer(encoder(), arguments(tmp_path))
    trainer.train()
    with TrainerTiers(**BUDGETS) as tier:
        with pytest.raises(tiermem.StepError, match="has state already"):
            tier.attach(trainer)
