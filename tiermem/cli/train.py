"""Train a byte-level GPT beyond its device budget and check it bit for bit.

Without options it trains on the source of Python's standard library with
budgets that force all three tiers, then trains the same model resident from the
same seed, compares losses and final weights, and writes a timeline.

With --checkpoint DIR --lora r=8 it puts adapters on the model in that folder instead and
trains them, while the model's weights stream from their files.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiermem.cli import finetune
from tiermem.cli.options import (
    activation_options,
    add_activation_arguments,
    check_rate,
    check_threads,
    check_whole,
    out_folder,
    parse_bytes,
    parse_depth,
    parse_path,
    parse_seed,
    pick_device,
    policy_of,
    written,
)
from tiermem.cli.room import with_room
from tiermem.config import Policy
from tiermem.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from tiermem import Stats
    from tiermem.cli.checkpoints import Saving
    from tiermem.cli.data import Corpus
    from tiermem.cli.training import Outcome, Settings

_SHORT = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}
_DTYPES = (*_SHORT.values(), *_SHORT)
_OPTION = {"hbm": "hbm", "dram": "dram", "nvme": "nvme_bytes"}

_FILES = ("timeline.png", "trace.json", "report.json")
"""What is written to --out."""


@dataclass(frozen=True)
class Tiers:
    """How the tiered run is set up.

    Attributes:
        hbm: Device budget in bytes.
        dram: Host budget in bytes.
        nvme: Folders of the swap files.
        nvme_bytes: Their budget in bytes.
        policy: Home of each role.
        prefetch_depth: Blocks, or ``"auto"``.
        activations: The manager's options for saved tensors.
    """

    hbm: int
    dram: int
    nvme: list[str]
    nvme_bytes: int
    policy: Policy
    prefetch_depth: int | str
    activations: dict[str, Any]

    def of_at_least(self, least: Mapping[str, int]) -> Tiers:
        """Returns settings with larger budgets, where ``least`` has a larger one for a tier."""
        return replace(
            self,
            hbm=max(self.hbm, least.get("hbm", 0)),
            dram=max(self.dram, least.get("dram", 0)),
            nvme_bytes=max(self.nvme_bytes, least.get("nvme", 0)),
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ``tiermem train``."""
    _add_model(parser.add_argument_group("model and training"))
    _add_tiers(parser.add_argument_group("tiers"))
    _add_output(parser.add_argument_group("output"))
    _add_saving(parser.add_argument_group("checkpoints"))
    finetune.add_checkpoint_arguments(parser)


def _add_model(model: argparse._ArgumentGroup) -> None:
    model.add_argument("--layers", type=int, default=24, metavar="N", help="default: 24")
    model.add_argument("--width", type=int, default=192, metavar="N", help="default: 192")
    model.add_argument(
        "--heads", type=int, metavar="N", help="default: 6, or fewer that divide the width"
    )
    model.add_argument(
        "--context",
        type=int,
        metavar="N",
        help=f"tokens in a sequence (default: {finetune.CONTEXT}, or what a --checkpoint has "
        "positions for if that is less)",
    )
    model.add_argument(
        "--batch", type=int, default=4, metavar="N", help="sequences in a forward (default: 4)"
    )
    model.add_argument(
        "--accumulate", type=int, default=1, metavar="N", help="forwards in a step (default: 1)"
    )
    model.add_argument("--steps", type=int, default=80, metavar="N", help="default: 80")
    model.add_argument("--lr", type=float, default=1e-3, help="learning rate (default: 0.001)")
    model.add_argument(
        "--clip",
        type=float,
        default=1.0,
        metavar="NORM",
        help="most that the norm of all gradients may be; 0 for any (default: 1.0)",
    )
    model.add_argument("--seed", type=parse_seed, default=0, help="default: 0")
    model.add_argument("--dtype", choices=_DTYPES, default="float32", help="default: float32")
    model.add_argument("--master", choices=_DTYPES, help="dtype of master weights (default: none)")
    model.add_argument("--checkpointing", action="store_true", help="recompute each layer")
    model.add_argument(
        "--loss-chunks",
        type=int,
        default=0,
        metavar="N",
        help="make logits and loss in N parts (default: all at once)",
    )
    model.add_argument(
        "--data",
        action="append",
        type=parse_path,
        default=[],
        metavar="PATH",
        help="a file or folder; repeatable (default: the source of Python's standard library)",
    )


def _add_tiers(tiers: argparse._ArgumentGroup) -> None:
    tiers.add_argument("--device", default="auto", help="auto, cpu or cuda (default: auto)")
    tiers.add_argument(
        "--hbm", metavar="SIZE", help="default: a quarter of the weights, or what they need"
    )
    tiers.add_argument(
        "--dram", metavar="SIZE", help="default: twice the weights, or what they need"
    )
    tiers.add_argument(
        "--nvme",
        action="append",
        type=parse_path,
        metavar="FOLDER",
        help="of the swap file; repeatable; 'none' for no such tier (default: a folder on a disk)",
    )
    tiers.add_argument("--nvme-bytes", metavar="SIZE", help="default: what can be needed")
    tiers.add_argument("--policy", help="a tier, or role=tier,... (default: auto)")
    tiers.add_argument(
        "--prefetch-depth", default="auto", metavar="N", help="blocks ahead (default: auto)"
    )
    add_activation_arguments(tiers)
    tiers.add_argument(
        "--optimizer-on",
        choices=("auto", "device", "host", "both"),
        default="auto",
        help="where steps are made. auto, the default: on the device, and in part on the host "
        "where that gives the device's bits. host and both may round differently",
    )
    tiers.add_argument(
        "--overlap",
        nargs="?",
        const="forward",
        default="auto",
        choices=("auto", "forward", "backward"),
        help="when a block's step is made. auto, the default: in backward or in the next forward, "
        "wherever no program can tell. forward (also --overlap alone): in the next forward. "
        "backward: as soon as its gradient is final, which excludes clipping (give --clip 0)",
    )


def _add_saving(saving: argparse._ArgumentGroup) -> None:
    saving.add_argument(
        "--save", type=parse_path, metavar="DIR", help="save the run there, at least at the end"
    )
    saving.add_argument(
        "--save-every", type=int, metavar="N", help="and after every N steps, while it goes on"
    )
    saving.add_argument(
        "--resume", action="store_true", help="go on from the checkpoint in --save, if it is there"
    )


def _add_output(output: argparse._ArgumentGroup) -> None:
    output.add_argument("--no-compare", action="store_true", help="skip the resident run")
    output.add_argument("--out", type=parse_path, metavar="FOLDER", help="default: demo-out")
    output.add_argument("--quiet", action="store_true", help="print only the verdict")
    output.add_argument("--json", action="store_true", help="print the report, as JSON, alone")
    output.add_argument(
        "--threads",
        type=int,
        metavar="N",
        help="of torch's kernels on the CPU (default: what a short trial finds best)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Runs ``tiermem train``."""
    if arguments.checkpoint is not None or arguments.lora is not None:
        return finetune.run(arguments)
    from rich.console import Console

    from tiermem.cli import report
    from tiermem.cli.checkpoints import read_saving
    from tiermem.cli.data import load_corpus
    from tiermem.cli.threads import threads
    from tiermem.cli.training import deterministic, trial

    began = time.perf_counter()
    settings = read_settings(arguments)
    tiers = read_tiers(arguments, settings)
    saving = read_saving(arguments.save, arguments.save_every, arguments.resume)
    corpus = load_corpus(arguments.data)
    out = out_folder(arguments.out or "demo-out", _FILES)
    quiet = arguments.quiet or arguments.json
    console = Console(highlight=False, quiet=arguments.json)
    if not quiet:
        budgets = {"hbm": tiers.hbm, "dram": tiers.dram, "nvme": tiers.nvme_bytes}
        report.print_plan(console, settings, corpus.source, budgets, tiers.nvme)

    number = threads(arguments.threads, settings.device, trial(settings))
    with number as used, deterministic(settings.device):
        given = [name for name in ("hbm", "dram", "nvme") if getattr(arguments, _OPTION[name])]
        tiered, stats, roles = with_room(
            lambda least: _run_tiered(
                corpus, settings, tiers.of_at_least(least), out, console, quiet, saving
            ),
            given,
            partial(report.print_raised, Console(highlight=False, quiet=quiet)),
        )
        gc.collect()
        compares = not arguments.no_compare and not tiered.interrupted
        found = _compare(tiered, corpus, settings, console, quiet) if compares else Comparison()

    interrupted = tiered.interrupted or found.interrupted
    text = report.make_report(
        settings,
        stats,
        tiered,
        found.resident,
        found.difference,
        roles,
        threads=used,
        interrupted=interrupted,
        seconds=time.perf_counter() - began,
    )
    with written(out / "report.json"):
        (out / "report.json").write_text(text + "\n", encoding="utf-8")
    if arguments.json:
        print(text)
    if not quiet:
        report.print_stats(console, stats, len(tiered.losses))
        report.print_roles(console, roles)
        console.print(f"timeline.png, trace.json and report.json are in {out}")
        console.print(
            f"{time.perf_counter() - began:.1f} s in all, {tiered.seconds:.1f} s of them in the "
            f"tiered run's steps; {used} CPU threads"
        )
    if interrupted:
        raise KeyboardInterrupt
    _print_comparison(tiered, found, settings, console)
    return 1 if found.difference else 0


@dataclass(frozen=True)
class Comparison:
    """What became of the resident run.

    Attributes:
        resident: How it went; None where it was not made, or not ended.
        difference: The first one, for messages; None for none, or where steps round differently.
        interrupted: Whether Ctrl-C ended it.
    """

    resident: Outcome | None = None
    difference: str | None = None
    interrupted: bool = False


def _compare(
    tiered: Outcome, corpus: Corpus, settings: Settings, console: Console, quiet: bool
) -> Comparison:
    """Trains the same model resident, and looks for a difference."""
    from tiermem.cli.training import first_difference

    resident = None
    try:
        resident = _run_resident(corpus, settings, console, quiet)
        alike = settings.rounds_alike
        return Comparison(resident, first_difference(tiered, resident) if alike else None)
    except KeyboardInterrupt:
        return Comparison(resident, interrupted=True)


def _print_comparison(
    tiered: Outcome, found: Comparison, settings: Settings, console: Console
) -> None:
    from tiermem.cli import report

    if found.resident is None:
        return
    if not settings.rounds_alike:
        report.print_rounding(console, tiered, found.resident)
        return
    tokens = settings.steps * settings.tokens_per_step
    report.print_verdict(console, tiered, found.resident, found.difference, tokens)


def read_settings(arguments: argparse.Namespace) -> Settings:
    """Checks the options of the training itself.

    Raises:
        ConfigError: If one cannot be used.
    """
    from tiermem.cli.model import Shape, usual_heads
    from tiermem.cli.training import Settings

    check_threads(arguments.threads)
    heads = usual_heads(arguments.width) if arguments.heads is None else arguments.heads
    context = finetune.CONTEXT if arguments.context is None else arguments.context
    for name in ("batch", "accumulate", "steps"):
        check_whole(name, getattr(arguments, name))
    if arguments.loss_chunks < 0:
        raise ConfigError(f"--loss-chunks must not be negative, not {arguments.loss_chunks}")
    check_rate(arguments.lr)
    if not arguments.clip >= 0:
        raise ConfigError(f"--clip must not be negative, not {arguments.clip}")
    if arguments.overlap == "backward" and arguments.clip:
        raise ConfigError(
            "--overlap backward steps blocks before the norm of all gradients is known: add "
            "--clip 0, or leave --overlap out (auto clips, as forward does)"
        )
    return Settings(
        shape=Shape(arguments.layers, arguments.width, heads, context),
        batch=arguments.batch,
        accumulate=arguments.accumulate,
        steps=arguments.steps,
        lr=arguments.lr,
        seed=arguments.seed,
        dtype=_dtype(arguments.dtype),
        device=pick_device(arguments.device),
        checkpointing=arguments.checkpointing,
        loss_chunks=arguments.loss_chunks,
        master=None if arguments.master is None else _dtype(arguments.master),
        optimizer_on=arguments.optimizer_on,
        overlap=arguments.overlap,
        clip=arguments.clip,
    )


def read_tiers(arguments: argparse.Namespace, settings: Settings) -> Tiers:
    """Checks budgets and paths, and fills in those that were not given.

    Raises:
        ConfigError: If one cannot be used.
    """
    from tiermem.cli.machine import default_swap_folder

    weights = settings.weight_bytes
    folders = [default_swap_folder()] if arguments.nvme is None else arguments.nvme
    if folders == ["none"]:
        folders = []
        if arguments.nvme_bytes is not None:
            raise ConfigError("--nvme-bytes is of the swap file, and --nvme none leaves it out")
    # Weights, gradients and two moments are four times the weights: twice leaves
    # half of it to the swap file; without one, DRAM has to hold it all, and some
    # room for alignment. With masters these and the moments are of their dtype.
    policy = policy_of(arguments)
    whole = settings.state_bytes + weights
    dram = settings.state_bytes // 2 if folders else whole
    if policy.activations == "dram":  # all else would take the room first
        dram = whole + settings.activation_bytes
    nvme = whole if folders else 0
    if policy.activations == "nvme":
        nvme += settings.activation_bytes
    return Tiers(
        hbm=_size(arguments.hbm, settings.state_bytes // 16, "--hbm"),
        dram=_size(arguments.dram, dram, "--dram"),
        nvme=folders,
        nvme_bytes=_size(arguments.nvme_bytes, nvme, "--nvme-bytes"),
        policy=policy,
        prefetch_depth=parse_depth(arguments.prefetch_depth),
        activations=activation_options(arguments),
    )


def _run_tiered(
    corpus: Corpus,
    settings: Settings,
    tiers: Tiers,
    out: Path,
    console: Console,
    quiet: bool,
    saving: Saving | None = None,
) -> tuple[Outcome, Stats, dict[str, dict[str, int]]]:
    import torch

    import tiermem
    from tiermem.cli.checkpoints import Checkpoints, describe
    from tiermem.cli.display import new_display
    from tiermem.cli.report import roles_at_home, write_pictures
    from tiermem.cli.training import Outcome, Progress, copy_weights, new_model, run_steps

    progress, weights, interrupted = Progress(), {}, False
    with tiermem.TierManager(**_manager_options(settings, tiers)) as tier:
        model = tier.wrap(new_model(settings))
        optimizer = tier.optimizer(
            model,
            torch.optim.AdamW,
            lr=settings.lr,
            master_dtype=settings.master,
            overlap=settings.overlap,
            where=settings.optimizer_on,
        )
        if settings.overlap == "backward":
            optimizer.accumulate(settings.accumulate)
        display = new_display("tiered", settings.steps, settings.tokens_per_step, console, quiet)
        try:
            with display:
                run_steps(
                    model,
                    optimizer,
                    optimizer.clip_grad_norm_,
                    corpus,
                    settings,
                    lambda step, loss: display.show_step(step, loss, tier.stats()),
                    progress,
                    None if saving is None else Checkpoints(tier, saving, describe(settings)),
                )
        except KeyboardInterrupt:  # what there is by now is reported
            interrupted = True
        stats = tier.stats()
        roles = roles_at_home(tier.residency())
        with written(out):
            write_pictures(out, tier.timeline, settings.shape.layers, progress)
        if not interrupted:
            with tier.materialize(model):
                weights = copy_weights(model)
        tier.close(discard=True)  # the weights were copied out above
    seconds, resumed = progress.seconds, progress.resumed
    return Outcome(progress.losses, weights, seconds, interrupted, resumed), stats, roles


def _run_resident(corpus: Corpus, settings: Settings, console: Console, quiet: bool) -> Outcome:
    from tiermem.cli.display import new_display
    from tiermem.cli.training import run_resident

    with new_display(
        "resident", settings.steps, settings.tokens_per_step, console, quiet
    ) as display:
        return run_resident(corpus, settings, display.show_step)


def _manager_options(settings: Settings, tiers: Tiers) -> dict[str, Any]:
    return {
        "device": settings.device,
        "hbm": tiers.hbm,
        "dram": tiers.dram,
        "nvme": tiers.nvme or None,
        "nvme_bytes": tiers.nvme_bytes if tiers.nvme else None,
        "policy": tiers.policy,
        "prefetch_depth": tiers.prefetch_depth,
        **tiers.activations,
    }


def _dtype(name: str) -> Any:
    """Returns the torch dtype of this name, long or short."""
    import torch

    return getattr(torch, _SHORT.get(name, name))


def _size(text: str | None, default: int, name: str) -> int:
    return default if text is None else parse_bytes(text, name)
