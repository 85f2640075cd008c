"""``tiermem train --checkpoint DIR --lora r=8``: adapters on weights that stay in their files.

The base weights stream from the folder, the adapters with their gradients and moments stay in HBM,
and ``--hbm`` caps the whole process: what activations will take is set aside, the rest is for the
tiers.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from tiermem.cli.options import (
    activation_options,
    check_rate,
    check_threads,
    check_whole,
    out_folder,
    parse_depth,
    parse_path,
    pick_device,
    policy_of,
    read_budget,
)
from tiermem.config import format_size
from tiermem.errors import CapacityError, ConfigError

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    import tiermem
    from tiermem.cli.adapting import Plan
    from tiermem.cli.checkpoints import Saving
    from tiermem.cli.folders import Folder
    from tiermem.cli.needs import Sizes
    from tiermem.cli.tokens import TokenCorpus
    from tiermem.cli.training import Progress

OUT = "adapters"
"""Where they are saved if nothing is said."""

CONTEXT = 128
"""Tokens in a sequence if nothing is said, and the model has positions for so many."""

_OF_THE_DEMONSTRATION = (
    *("layers", "width", "heads", "dtype", "master", "nvme_bytes", "optimizer_on", "overlap"),
    "no_compare",
)
_RESERVE = 256 << 20
"""Of the device: kernels that are loaded when they are first used, workspaces of their libraries,
and rounding of torch's allocator."""
_CONTEXT = 512 << 20
"""About what CUDA itself takes of a device for a process, where it cannot be measured."""


def add_checkpoint_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of adapters to those of ``tiermem train``."""
    group = parser.add_argument_group(
        "adapters on a checkpoint", "--hbm is a cap on the whole process there"
    )
    group.add_argument(
        "--checkpoint", type=parse_path, metavar="DIR", help="folder of the model to fine-tune"
    )
    group.add_argument(
        "--lora",
        metavar="r=N,...",
        help="options of tiermem.Lora, such as r=8,alpha=16,target_modules=q_proj+v_proj; the "
        f"adapters are saved to --out (default: {OUT}) as peft's files",
    )
    # Options that were given can be told from those that were not, which have these values.
    parser.set_defaults(of_the_demonstration=_defaults(parser))


def _defaults(parser: argparse.ArgumentParser) -> dict[str, Any]:
    return {name: parser.get_default(name) for name in _OF_THE_DEMONSTRATION}


def run(arguments: argparse.Namespace) -> int:
    """Runs ``tiermem train --checkpoint``."""
    import torch
    from rich.console import Console

    from tiermem.cli.checkpoints import read_saving
    from tiermem.cli.folders import open_folder
    from tiermem.cli.threads import threads

    asked = read_plan(arguments)
    wish = parse_lora(arguments.lora)
    quiet = arguments.quiet or arguments.json
    console = Console(highlight=False, quiet=quiet)
    console.print(f"looking at {arguments.checkpoint}")
    folder = open_folder(arguments.checkpoint, checkpointing=True)
    if folder.adapters is not None:
        raise ConfigError(
            f"{folder.adapters} has adapters on {folder.path} already, and new ones are for a "
            f"model without: give --checkpoint {folder.path}, or merge them first, in peft with "
            "merge_and_unload() and save_pretrained(another)"
        )
    plan, lora = fitted(asked, folder, given=arguments.context is not None), on(folder, wish)
    tiers = pick_tiers(arguments, folder, lora, plan)
    saving = read_saving(arguments.save, arguments.save_every, arguments.resume)
    # No trial finds a number: a piece of this work would take the weights' whole way.
    number = arguments.threads or torch.get_num_threads()
    with threads(number, plan.device, lambda: None), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of transformers, about its own names
        result = _train(arguments, folder, lora, plan, tiers, saving, console)
    if arguments.json:
        print(json.dumps(result, indent=2))
    console.print(
        f"{result['tokens_per_second']:,.0f} tokens/s in {result['seconds']:.1f} s; the adapters "
        f"are in {result['adapters']}"
    )
    return 0


def read_plan(arguments: argparse.Namespace) -> Plan:
    """Checks the options of the training.

    Raises:
        ConfigError: If one cannot be used, or is about the demonstration's model alone.
    """
    from tiermem.cli.adapting import Plan

    if arguments.checkpoint is None or arguments.lora is None:
        given, other = ("lora", "checkpoint") if arguments.lora else ("checkpoint", "lora")
        raise ConfigError(f"--{given} needs --{other}, too: adapters are put on a checkpoint")
    for name, default in arguments.of_the_demonstration.items():
        if getattr(arguments, name, default) != default:
            option = name.replace("_", "-")
            raise ConfigError(
                f"--{option} is about the model that tiermem train makes itself; leave it out "
                "with --checkpoint"
            )
    for name in ("batch", "accumulate", "steps"):
        check_whole(name, getattr(arguments, name))
    context = CONTEXT if arguments.context is None else arguments.context
    check_whole("context", context, 2)
    for name in ("clip", "loss_chunks"):
        if not getattr(arguments, name) >= 0:
            raise ConfigError(f"--{name.replace('_', '-')} must not be negative")
    check_rate(arguments.lr)
    check_threads(arguments.threads)
    return Plan(
        batch=arguments.batch,
        accumulate=arguments.accumulate,
        context=context,
        steps=arguments.steps,
        lr=arguments.lr,
        clip=arguments.clip,
        seed=arguments.seed,
        device=pick_device(arguments.device),
        loss_chunks=arguments.loss_chunks,
    )


def fitted(plan: Plan, folder: Folder, *, given: bool) -> Plan:
    """Returns a plan whose context, where none was given, is one that the model has."""
    from tiermem.cli.needs import sizes_of

    positions = sizes_of(folder.model).positions
    if given or positions is None:
        return plan
    return replace(plan, context=max(2, min(plan.context, positions)))


def on(folder: Folder, lora: tiermem.Lora) -> tiermem.Lora:
    """Returns the options of adapters for a model; those of a byte GPT are on its linear layers."""
    from tiermem.cli.model import LINEAR

    if folder.is_byte_gpt and lora.target_modules is None:
        return replace(lora, target_modules=LINEAR)
    return lora


def parse_lora(text: str) -> tiermem.Lora:
    """Reads ``"r=8,alpha=16,target_modules=q_proj+v_proj"``.

    Raises:
        ConfigError: If an option is unknown, or has no such value.
    """
    from tiermem import Lora

    options: dict[str, Any] = {}
    for part in text.split(","):
        name, equals, value = (each.strip() for each in part.partition("="))
        if not equals or name not in _READ:
            raise ConfigError(
                f"--lora: {part!r} is no option=value with one of the options {sorted(_READ)}"
            )
        if name in options:
            raise ConfigError(f"--lora: {name} is given twice")
        try:
            options[name] = _READ[name](value)
        except (ValueError, KeyError):
            raise ConfigError(f"--lora: {name} cannot be {value!r}") from None
    return Lora(**options)


def _names(text: str) -> str | list[str]:
    return text if text == "all-linear" else text.split("+")


_TRUTH = {"true": True, "1": True, "false": False, "0": False}


def _truth(text: str) -> bool:
    return _TRUTH[text.lower()]


_READ: Mapping[str, Callable[[str], Any]] = {
    "r": int,
    "alpha": float,
    "dropout": float,
    "target_modules": _names,
    "exclude_modules": _names,
    "modules_to_save": lambda text: text.split("+"),
    "bias": str,
    "rslora": _truth,
    "init": str,
    "layers_to_transform": lambda text: [int(each) for each in text.split("+")],
    "lora_bias": _truth,
    "task_type": str,
}


# -- budgets ---------------------------------------------------------------


@dataclass(frozen=True)
class Tiers:
    """How much of the device is for what, in bytes.

    Attributes:
        cap: For the whole process.
        activations: Set aside for what is computed.
        adapters: For adapters, their gradients and moments; they are in the tiers.
        hbm: Budget of the tiers.
        context: What CUDA itself has.
    """

    cap: int
    activations: int
    adapters: int
    hbm: int
    context: int = 0


def pick_tiers(
    arguments: argparse.Namespace, folder: Folder, lora: tiermem.Lora, plan: Plan
) -> Tiers:
    """Divides the cap, before anything is loaded.

    Raises:
        CapacityError: If it is too small, or the model has no positions for such a context.
    """
    import torch

    from tiermem.cli.adapting import can_recompute
    from tiermem.cli.needs import least_budgets, sizes_of
    from tiermem.given import default_hbm, device_of, hbm_of

    sizes = sizes_of(folder.model)
    _check_context(sizes, plan.context)
    device = device_of(plan.device)
    asked = hbm_of(read_budget(arguments.hbm, "--hbm"), device)
    cap = default_hbm(device) if asked is None else asked
    activations = sizes.training_nbytes(
        plan.batch * plan.context, plan.loss_chunks, can_recompute(folder.model)
    )
    activations += _RESERVE if device.type == "cuda" else 0
    context = context_nbytes(device)
    stand_in, trained = _with_adapters(folder, lora)
    numbers = sum(param.numel() * param.element_size() for param in trained)
    held = torch.cuda.memory_reserved(device) if device.type == "cuda" else 0
    # Clipping and the step hold one gradient's worth beside what the tiers hold.
    hbm = cap - context - held - activations - numbers
    found = least_budgets(
        stand_in,
        torch.optim.AdamW,
        trained,
        device=plan.device,
        hbm=max(hbm, 0),
        nvme=True,
        policy=policy_of(arguments),
    )
    if hbm < found.least_hbm:
        least = found.least_hbm + context + held + activations + numbers
        cuda = f"CUDA itself takes {format_size(context)}, " if context else ""
        cuda += f"torch has taken {format_size(held)} already, " if held else ""
        raise CapacityError(
            f"--hbm {format_size(cap)} is a cap on the whole process: {cuda}activations of "
            f"{plan.batch} x {plan.context} tokens take {format_size(activations)}, the adapters' "
            f"step {format_size(numbers)}, and the tiers need {format_size(found.least_hbm)}",
            f"give --hbm {least} ({format_size(least)}) or more, a smaller --batch (with "
            "--accumulate) or --context, or --loss-chunks",
        )
    return Tiers(cap, activations, 4 * numbers, hbm, context)


def context_nbytes(device: torch.device) -> int:
    """Returns the bytes of a device that CUDA itself takes for this process; 0 on the CPU.

    That is what is in use there and not torch's, unless it is too much to be that: then there are
    other processes, and about what a context takes is returned.
    """
    import torch

    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)  # has the context made
    beside = total - free - torch.cuda.memory_reserved(device)
    return beside if 0 < beside <= 2 * _CONTEXT else _CONTEXT


def _check_context(sizes: Sizes, context: int) -> None:
    if sizes.positions is not None and context > sizes.positions:
        raise CapacityError(
            f"--context {context} is more than the model's {sizes.positions} positions",
            f"give --context {sizes.positions} at most",
        )


def _with_adapters(folder: Folder, lora: tiermem.Lora) -> tuple[Any, list[Any]]:
    """Returns a model without weights that has the adapters, and these; nothing is drawn."""
    import torch

    from tiermem import add_adapters

    model = copy.deepcopy(folder.model)
    with torch.random.fork_rng([]):
        add_adapters(model, lora)
    return model, [param for param in model.parameters() if param.requires_grad]


@contextlib.contextmanager
def capped(tier: tiermem.TierManager, tiers: Tiers, device: str) -> Iterator[None]:
    """Limits torch's allocator so that the device's cap is kept, inside ``with``.

    The tiers' memory is the driver's, and not counted by torch, or one allocation of torch's,
    where a driver cannot map it; nor does torch count what CUDA itself has.
    """
    import torch

    from tiermem.given import device_of
    from tiermem.storage.arena import DeviceArena

    where = device_of(device)  # with its number, which torch asks for
    if where.type != "cuda":
        yield
        return
    torch.cuda.empty_cache()
    most = tiers.cap - tiers.context
    if not isinstance(tier._manager.parts.slots.arena, DeviceArena):
        most -= tiers.hbm
    total = torch.cuda.get_device_properties(where).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, most / total), where)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, where)


# -- the run ---------------------------------------------------------------


class _Saves:
    """``--save``, ``--save-every`` and ``--resume``: all of the run, base weights included.

    Attributes:
        failed: Why one could not be made.
    """

    def __init__(
        self,
        tier: tiermem.TierManager,
        saving: Saving,
        arguments: argparse.Namespace,
        plan: Plan,
        folder: Folder,
        progress: Progress,
    ) -> None:
        from tiermem.cli.checkpoints import Checkpoints
        from tiermem.cli.folders import about

        described = {**asdict(plan), "lora": arguments.lora}
        del described["device"]
        self._checkpoints = Checkpoints(tier, saving, described, about(folder))
        self.failed: tiermem.TierError | None = None
        self._progress = progress

    def resume(self, scheduler: Any, generator: torch.Generator) -> int:
        self._checkpoints.resume(self._progress, scheduler, generator)
        self._progress.resumed = len(self._progress.losses)
        return self._progress.resumed

    def after(
        self, step: int, last: bool, optimizer: Any, scheduler: Any, generator: torch.Generator
    ) -> None:
        import tiermem

        try:
            self._checkpoints.after(step, last, optimizer, self._progress, scheduler, generator)
        except tiermem.TierError as error:
            self.failed = error
            raise


def _train(
    arguments: argparse.Namespace,
    folder: Folder,
    lora: tiermem.Lora,
    plan: Plan,
    tiers: Tiers,
    saving: Saving | None,
    console: Console,
) -> dict[str, Any]:
    """Trains, saves the adapters, and returns what is reported."""
    import torch

    import tiermem
    from tiermem.cli.adapting import corpus_of, prepare
    from tiermem.cli.training import Progress
    from tiermem.loading.load import load_made

    corpus = corpus_of(arguments.data, folder.tokens)
    corpus.check(plan.context)
    out = out_folder(arguments.out or OUT)
    progress = Progress()
    with (
        tiermem.TierManager(plan.device, **_manager_options(arguments, tiers)) as tier,
        capped(tier, tiers, plan.device),
    ):
        console.print(_divided(tiers, tier.stats().budget["dram"], corpus))
        torch.manual_seed(plan.seed)
        model = load_made(folder.model, folder.path, tier=tier, tell=console.print, lora=lora)
        prepare(model)
        saves = None if saving is None else _Saves(tier, saving, arguments, plan, folder, progress)
        quiet = arguments.quiet or arguments.json
        parts = tier, model, corpus, plan, progress, saves
        try:
            seconds, interrupted = _make_steps(*parts, console, quiet)
        except tiermem.TierError as error:
            # the step before a save that failed was made as a whole
            if saves is not None and saves.failed is error:
                tiermem.save_adapters(model, out)
                console.print(f"the adapters after {len(progress.losses)} steps are in {out}")
            raise
        tiermem.save_adapters(model, out)
        tier.close(discard=True)
    losses = progress.losses
    if interrupted:
        console.print(f"the adapters after {len(losses)} steps are in {out}")
        raise KeyboardInterrupt
    tokens = (len(losses) - progress.resumed) * plan.tokens_per_step
    return {
        "losses": losses,
        "seconds": seconds,
        "tokens_per_second": tokens / max(seconds, 1e-9),
        "hbm": tiers.hbm,
        "context": tiers.context,
        "activations": tiers.activations,
        "adapters": str(out),
    }


def _manager_options(arguments: argparse.Namespace, tiers: Tiers) -> dict[str, Any]:
    nvme = [path for path in arguments.nvme or [] if path != "none"]
    return {
        "hbm": tiers.hbm,
        "dram": read_budget(arguments.dram, "--dram"),
        "nvme": nvme or None,
        "policy": policy_of(arguments),
        "prefetch_depth": parse_depth(arguments.prefetch_depth),
        **activation_options(arguments),
    }


def _divided(tiers: Tiers, dram: int, corpus: TokenCorpus) -> str:
    """Returns a sentence of what memory is for what."""
    context = f"{format_size(tiers.context)} for CUDA itself, " if tiers.context else ""
    return (
        f"{format_size(tiers.cap)} for the process: {context}{format_size(tiers.hbm)} of HBM for "
        f"the tiers, {format_size(tiers.adapters)} of it for adapters with their optimizer, and "
        f"{format_size(tiers.activations)} for activations; {format_size(dram)} of DRAM; "
        f"{corpus.count:,} tokens of {corpus.source}"
    )


def _make_steps(
    tier: tiermem.TierManager,
    model: Any,
    corpus: TokenCorpus,
    plan: Plan,
    progress: Progress,
    saves: _Saves | None,
    console: Console,
    quiet: bool,
) -> tuple[float, bool]:
    """Makes the steps and shows them; returns how long it took, and whether Ctrl-C ended it."""
    import torch

    from tiermem.cli.adapting import train
    from tiermem.cli.display import new_display

    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = tier.optimizer(trained, torch.optim.AdamW, lr=plan.lr)
    display = new_display("adapters", plan.steps, plan.tokens_per_step, console, quiet)

    def shown(step: int, loss: float) -> None:
        progress.losses.append(loss)
        display.show_step(step, loss, tier.stats())

    began, interrupted = time.perf_counter(), False
    try:
        with display:
            train(model, optimizer, optimizer.clip_grad_norm_, corpus, plan, shown, saves)
    except KeyboardInterrupt:  # what there is by now is saved
        interrupted = True
    return time.perf_counter() - began, interrupted
