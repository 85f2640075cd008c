"""Steps of Trainer and of Lightning over tiers, beside a bare loop over the same tiers.

Each loop trains the same model on the same tokens: AdamW, clipping by norm, a constant rate. What
``of bare`` says is the trainer's own share and the integration's together (``CPU of bare`` the same
by the process's own time, for a machine that others use, too); the first losses are made with
deterministic kernels and compared; ``bare-looks`` is a bare loop that looks for NaN in every loss
as Trainer does, which makes the host wait; ``integration's share`` is the time
spent in the lines of ``tiermem.integrations`` alone, by a profile of some more steps. With
``--resident`` the same loops run without tiermem: what a trainer costs by itself.

    python benchmarks/bench_trainers.py --out benchmarks/results/trainers_H200.json
    python benchmarks/bench_trainers.py --device cpu --shape narrow --tokens 256 --hbm 8MiB
"""

from __future__ import annotations

import argparse
import cProfile
import itertools
import pstats
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import failure, integration, report
from llama import SHAPES, allow_deterministic_products, deterministic, give_back
from profile_step import step_profile
from torch import Tensor, nn
from training import LR, Data, build, parameters_of, settle_python

import tiermem

hugging_face = integration("hugging_face")
KINDS = ("bare", "bare-looks", "Trainer", "Lightning")
CLIP = 1.0
Row = dict[str, Any]


class Model(nn.Module):
    """A Llama whose forward takes a batch as trainers give it, and returns the loss.

    Args:
        lm: Returns the loss of ids.
    """

    def __init__(self, lm: nn.Module) -> None:
        super().__init__()
        self.lm = lm

    def forward(self, ids: Tensor) -> tuple[Tensor]:
        """Returns the loss alone."""
        return (self.lm(ids),)


class Ids(torch.utils.data.Dataset[dict[str, Tensor]]):
    """The same sequences at every place, so that no sampler changes anything."""

    def __init__(self, ids: Tensor, count: int) -> None:
        self._ids = ids
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if index >= self._count:
            raise IndexError(index)
        return {"ids": self._ids}


class Marks:
    """The ends of steps, on the device's own clock, without waits in between.

    Args:
        kind: Of the loop.
        device: Whose.
        options: How many steps there are of each kind.
    """

    def __init__(self, kind: str, device: torch.device, options: argparse.Namespace) -> None:
        self.losses: list[Tensor] = []
        self.tier: tiermem.TierManager | None = None
        self.nbytes = 0
        self._kind, self._device = kind, device
        self._cuda = device.type == "cuda"
        self._options = options
        self._ends: list[Any] = []
        self._host: list[float] = []
        self._profile = cProfile.Profile()
        self._traced = ExitStack()
        self.checked = ExitStack()
        self.checked.enter_context(deterministic())

    @property
    def total(self) -> int:
        """How many steps are made."""
        return self._options.warm + self._options.steps + self._options.profiled

    def end(self) -> None:
        """A step is over."""
        self._host.append(time.process_time())
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._ends.append(event)
        else:
            self._ends.append(time.perf_counter())
        done, timed = len(self._ends), self._options.warm + self._options.steps
        if done == self._options.checked:
            self.checked.close()
        if self.tier is not None and done == self._options.warm:
            self.tier.reset_stats()
            settle_python()
        if done == timed and self.tier is not None:
            self.nbytes = sum(link.nbytes for link in self.tier.stats().links.values())
        if self._options.profile:  # two steps: what one leaves to the next is seen
            if done == timed:
                path = f"{self._options.profile}.{self._kind}.txt"
                self._traced.enter_context(step_profile(path, self._device))
            if done == timed + 2:
                self._traced.close()
        elif done == timed:
            self._profile.enable()
        if done == self.total:
            self._profile.disable()

    def row(self) -> Row:
        """Returns what was found."""
        if self._cuda:
            torch.cuda.synchronize()
        first, last = self._options.warm, self._options.warm + self._options.steps
        ends = self._ends[first - 1 : last]
        seconds = [
            a.elapsed_time(b) / 1e3 if self._cuda else b - a for a, b in itertools.pairwise(ends)
        ]
        host = [b - a for a, b in itertools.pairwise(self._host[first - 1 : last])]
        return {
            "s": statistics.median(seconds),
            "max s": max(seconds),
            "CPU s": statistics.median(host),
            "integration's share": None if self._options.profile else self._share(),
            "GB moved a step": self.nbytes / self._options.steps / 1e9,
        }

    def _share(self) -> float:
        """Returns how much of the profiled time was in lines of the integrations."""
        stats: Any = pstats.Stats(self._profile).stats  # type: ignore[attr-defined]
        folder = str(Path(hugging_face.__file__).parent)
        inside = sum(
            own for (file, *_), (_, _, own, *_) in stats.items() if file.startswith(folder)
        )
        return float(inside / sum(own for _, _, own, *_ in stats.values()))


def bare(
    model: nn.Module, data: Ids, marks: Marks, options: argparse.Namespace, *, looks: bool = False
) -> None:
    """The loop as one writes it by hand.

    Args:
        model: Takes a batch, returns the loss.
        data: Its batches.
        marks: Takes the ends of steps.
        options: Of the command line.
        looks: Whether it looks for NaN in every loss, as Trainer does: the host waits for it.
    """
    device = torch.device(options.device)
    allow_deterministic_products(device)
    settings: dict[str, Any] = {"lr": LR, "weight_decay": 0.0, "fused": True}
    with ExitStack() as opened:
        optimizer: Any
        if options.resident:
            optimizer = torch.optim.AdamW(model.to(device).parameters(), **settings)
            clip = partial(nn.utils.clip_grad_norm_, list(model.parameters()))
        else:
            marks.tier = opened.enter_context(
                tiermem.TierManager(device, hbm=options.hbm, dram=options.dram)
            )
            marks.tier.wrap(model)
            optimizer = marks.tier.optimizer(
                model, torch.optim.AdamW, overlap=options.overlap, **settings
            )
            clip = optimizer.clip_grad_norm_
        scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
        model.train()
        for batch in torch.utils.data.DataLoader(data, batch_size=None):
            (loss,) = model(**{k: v.to(device, non_blocking=True) for k, v in batch.items()})
            loss.backward()
            if looks and not torch.isfinite(loss):
                raise RuntimeError("the loss is not finite")
            clip(CLIP)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            marks.losses.append(loss.detach())
            marks.end()
        if marks.tier is not None:
            marks.tier.close(discard=True)


def by_trainer(model: nn.Module, data: Ids, marks: Marks, options: argparse.Namespace) -> None:
    """transformers' Trainer."""
    import transformers

    transformers.logging.set_verbosity_error()

    class Noted(transformers.Trainer):  # type: ignore[misc, name-defined]
        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            loss: Tensor = super().training_step(*args, **kwargs)
            marks.losses.append(loss)
            return loss

    class Ends(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            marks.end()

    with tempfile.TemporaryDirectory() as folder:
        args = transformers.TrainingArguments(
            folder,
            max_steps=marks.total,
            per_device_train_batch_size=1,
            learning_rate=LR,
            lr_scheduler_type="constant",
            optim="adamw_torch_fused",
            max_grad_norm=CLIP,
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            remove_unused_columns=False,
            disable_tqdm=True,
            use_cpu=options.device == "cpu",
            logging_nan_inf_filter=not options.unfiltered,
        )
        where = {"device": options.device, "hbm": options.hbm, "dram": options.dram}
        first: Callable[[list[Any]], Any] = lambda rows: rows[0]  # noqa: E731
        train: Callable[..., Any] = lambda **more: Noted(  # noqa: E731
            model, args, data_collator=first, train_dataset=data, callbacks=[Ends()], **more
        ).train()
        if options.resident:
            train()
            return
        with hugging_face.TrainerTiers(**where) as tier:
            marks.tier = tier
            train(optimizers=tier.optimizers(model, args, overlap=options.overlap))
            tier.close(discard=True)


def by_lightning(model: nn.Module, data: Ids, marks: Marks, options: argparse.Namespace) -> None:
    """Lightning's Trainer."""
    import lightning

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
            loss: Tensor = self.model(**batch)[0]
            marks.losses.append(loss.detach())
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=LR, weight_decay=0.0, fused=True)

    strategy: Any = lightning.pytorch.strategies.SingleDeviceStrategy(options.device)
    if not options.resident:
        strategy = integration("lightning").TierStrategy(
            options.device,
            optimizer={"overlap": options.overlap},
            hbm=options.hbm,
            dram=options.dram,
        )

    class Ends(lightning.Callback):  # type: ignore[misc, name-defined]
        def on_train_start(self, *_: Any) -> None:
            marks.tier = getattr(strategy, "tier", None)

        def on_train_batch_end(self, *_: Any) -> None:
            marks.end()

    quiet = ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing")
    with tempfile.TemporaryDirectory() as folder:
        lightning.Trainer(
            strategy=strategy,
            default_root_dir=folder,
            max_steps=marks.total,
            gradient_clip_val=CLIP,
            callbacks=[Ends()],
            **dict.fromkeys(quiet, False),
        ).fit(Module(), torch.utils.data.DataLoader(data, batch_size=None))


LOOPS: dict[str, Callable[..., None]] = dict(
    zip(KINDS, (bare, partial(bare, looks=True), by_trainer, by_lightning), strict=True)
)


def measure(kind: str, options: argparse.Namespace) -> tuple[Row, list[Tensor]]:
    """Makes the steps of one loop; returns its row and its losses."""
    device = torch.device(options.device)
    allow_deterministic_products(device)
    lm = build(options.shape, device, chunks=options.chunks, layers=options.layers)
    ids = Data(options.tokens, lm.head.out_features, torch.device("cpu"), 1).micro_batch(0)
    marks = Marks(kind, device, options)
    row: Row = {"loop": kind, "parameters": parameters_of(lm)}
    with marks.checked:
        LOOPS[kind](Model(lm), Ids(ids, marks.total), marks, options)
    return {**row, **marks.row()}, [loss.to("cpu") for loss in marks.losses[: options.checked]]


def main() -> None:
    """Measures and reports; what fails says so."""
    options = _options()
    rows: list[Row] = []
    losses: dict[str, list[Tensor]] = {}
    once = partial(report, "Trainers over tiers, beside a bare loop", rows)
    for kind in options.what:
        try:
            row, losses[kind] = measure(kind, options)
            rows.append(row)
            if "bare" in losses:
                row["of bare"] = row["s"] / rows[0]["s"]
                row["CPU of bare"] = row["CPU s"] / rows[0]["CPU s"]
                row["losses equal"] = losses[kind] == losses["bare"]
        except (ImportError, RuntimeError, tiermem.TierError) as error:
            rows.append({"loop": kind, "note": failure(error)})
        give_back(torch.device(options.device))
        once(options.out, tokens=options.tokens, hbm=options.hbm, overlap=options.overlap)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", choices=sorted(SHAPES), default="1b")
    parser.add_argument("--layers", type=int, help="instead of the shape's own")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--chunks", type=int, default=16, help="parts of the loss")
    parser.add_argument("--hbm", default="4GiB", help="budget of each loop")
    parser.add_argument("--dram", default="24GiB", help="likewise")
    parser.add_argument("--overlap", choices=("no", "forward"), default="forward")
    parser.add_argument("--resident", action="store_true", help="without tiermem")
    parser.add_argument("--what", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument(
        "--checked", type=int, default=3, help="of them, with kernels whose bits are compared"
    )
    parser.add_argument("--warm", type=int, default=6)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--profiled", type=int, default=3, help="steps under a profile, not timed")
    parser.add_argument(
        "--profile", metavar="PATH", help="where two steps' time goes, to PATH.*.txt"
    )
    parser.add_argument("--unfiltered", action="store_true", help="Trainer does not look for NaN")
    parser.add_argument("--out", help="JSON file; the same as Markdown beside it")
    options = parser.parse_args()
    options.overlap = options.overlap == "forward" and "forward"
    return options


if __name__ == "__main__":
    main()
