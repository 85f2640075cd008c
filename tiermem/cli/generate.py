"""Write text with a model larger than device and host memory, straight from its folder.

The folder is one of transformers, or what ``tiermem train --save`` wrote. Text goes to standard
output as it comes; progress, speed and the bound on it go to standard error.
"""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from tiermem.cli.options import check_whole, parse_path, parse_seed, pick_device, read_budget
from tiermem.cli.plan import add_speed_arguments, read_speeds
from tiermem.config import format_size
from tiermem.errors import CapacityError, ConfigError

if TYPE_CHECKING:
    from rich.console import Console
    from torch import nn

    from tiermem import TierManager
    from tiermem.cli.folders import Folder
    from tiermem.cli.generation import Sampling
    from tiermem.cli.needs import Sizes

_PLAIN_LINES = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ``tiermem generate``."""
    parser.add_argument("folder", type=parse_path, metavar="DIR", help="of the model")
    text = parser.add_argument_group("text")
    text.add_argument("--prompt", required=True, metavar="TEXT")
    text.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="(default: 128)")
    text.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        metavar="T",
        help="draw tokens, with logits divided by T (default: 0, always the likeliest)",
    )
    text.add_argument("--seed", type=parse_seed, default=0, help="of the draws")
    tiers = parser.add_argument_group("tiers")
    tiers.add_argument("--device", default="auto", help="auto, cpu or cuda (default: auto)")
    tiers.add_argument(
        "--hbm",
        metavar="SIZE",
        help="of weights on the device; keys, values and activations come on top "
        "(default: 80%% of what is free, or what these leave)",
    )
    tiers.add_argument(
        "--dram", metavar="SIZE", help="host memory (default: half of what is available)"
    )
    tiers.add_argument(
        "--nvme",
        action="append",
        type=parse_path,
        metavar="FOLDER",
        help="of a swap file; none is needed to read",
    )
    speeds = parser.add_argument_group("speeds, for the bound")
    add_speed_arguments(speeds)
    parser.add_argument("--quiet", action="store_true", help="print the text alone")


def run(arguments: argparse.Namespace) -> int:
    """Runs ``tiermem generate``."""
    from rich.console import Console

    console = Console(stderr=True, highlight=False, quiet=arguments.quiet)
    with Progress(console) as progress:
        progress.say(f"looking at {arguments.folder}")
        sampling = read_sampling(arguments)
        read_speeds(arguments)  # refuses them now, not once the text is there
        for name in ("hbm", "dram"):
            read_budget(getattr(arguments, name), f"--{name}")
        from tiermem.cli.folders import open_folder

        folder = open_folder(arguments.folder)
        prompt = folder.tokens.encode(arguments.prompt)
        _write(arguments, folder, prompt, sampling, progress)
    return 0


def read_sampling(arguments: argparse.Namespace) -> Sampling:
    """Checks the options about the text.

    Raises:
        ConfigError: If one cannot be used.
    """
    from tiermem.cli.generation import Sampling

    check_whole("max-new-tokens", arguments.max_new_tokens)
    if not 0 <= arguments.temperature < float("inf"):
        raise ConfigError(f"--temperature must be a number from 0 on, not {arguments.temperature}")
    return Sampling(arguments.max_new_tokens, arguments.temperature, arguments.seed)


def check_length(folder: Folder, sizes: Sizes, prompt: int, new: int) -> None:
    """Refuses sequences that the model has no positions for.

    A byte GPT goes on with the last bytes that it can see; the prompt has to fit.

    Raises:
        ConfigError: If there is no token to begin with.
        CapacityError: If there are too many.
    """
    if not prompt:
        raise ConfigError("--prompt is no token: give some text")
    whole = prompt if folder.is_byte_gpt else prompt + new
    if sizes.positions is None or whole <= sizes.positions:
        return
    asked = f"the prompt's {prompt} tokens"
    if not folder.is_byte_gpt:
        asked += f" and {new} new ones"
    room = sizes.positions - prompt
    advice = (
        f"give --max-new-tokens {room} at most"
        if room > 0 and not folder.is_byte_gpt
        else "give a shorter --prompt"
    )
    raise CapacityError(f"{asked} are more than the model's {sizes.positions} positions", advice)


def pick_hbm(arguments: argparse.Namespace, model: nn.Module, device: str, beside: int) -> int:
    """Returns the budget for weights, filled as far as the device has room.

    Args:
        arguments: With ``--hbm``.
        model: Without its weights.
        device: Where it will run.
        beside: Bytes that keys, values and activations will take.

    Raises:
        CapacityError: If the device, or ``--hbm``, is too small.
    """
    from tiermem.cli.needs import least_budgets
    from tiermem.given import device_of, hbm_of

    free = free_nbytes(device)
    given = hbm_of(read_budget(arguments.hbm, "--hbm"), device_of(device))
    found = least_budgets(model, device=device, hbm=given, nvme=True)
    if given is None and found.least_hbm + beside > free > beside:
        # blocks follow the budget: with what is free they are smaller
        found = least_budgets(model, device=device, hbm=free - beside, nvme=True)
    what = f"keys, values and activations take {format_size(beside)}"
    if found.least_hbm + beside > free:
        raise CapacityError(
            f"{what} and the largest blocks of weights {format_size(found.least_hbm)}, and "
            f"{device} has {format_size(free)} free",
            "give a shorter --prompt or fewer --max-new-tokens, or free memory there",
        )
    if given is None:
        return max(min(found.hbm, free - beside), found.least_hbm)
    if given < found.least_hbm:
        raise CapacityError(
            f"--hbm {format_size(given)} does not hold the blocks of weights in use at one time",
            f"give --hbm {found.least_hbm} ({format_size(found.least_hbm)}) or more",
        )
    if given + beside > free:
        raise CapacityError(
            f"--hbm {format_size(given)} is for weights; {what} beside them, and {device} has "
            f"{format_size(free)} free",
            f"give --hbm {free - beside} ({format_size(free - beside)}) at most, a shorter "
            "--prompt or fewer --max-new-tokens",
        )
    return given


def free_nbytes(device: str) -> int:
    """Returns the bytes that are free where the model computes."""
    import torch

    from tiermem.runtime.memory.hostmemory import available_memory

    if device.startswith("cuda"):
        return int(torch.cuda.mem_get_info(device)[0])
    return available_memory()


def _write(
    arguments: argparse.Namespace,
    folder: Folder,
    prompt: list[int],
    sampling: Sampling,
    progress: Progress,
) -> None:
    import tiermem
    from tiermem.cli.bound import streamed_nbytes
    from tiermem.cli.needs import sizes_of

    device = pick_device(arguments.device)
    sizes = sizes_of(folder.model)
    check_length(folder, sizes, len(prompt), sampling.tokens)
    cache = sizes.cache_nbytes(len(prompt) + sampling.tokens)
    beside = cache + sizes.forward_nbytes(len(prompt))
    hbm = pick_hbm(arguments, folder.model, device, beside)
    weights = streamed_nbytes(folder.model)
    dram = read_budget(arguments.dram, "--dram")
    with tiermem.TierManager(device, hbm=hbm, dram=dram, nvme=arguments.nvme or None) as tier:
        budget = tier.stats().budget
        progress.say(
            f"loading: {format_size(weights)} of weights for each token; "
            f"{format_size(budget['hbm'])} of HBM for them, {format_size(cache)} for keys and "
            f"values, {format_size(beside - cache)} for activations; "
            f"{format_size(budget['dram'])} of DRAM"
        )
        model = _loaded(folder, tier, progress)
        writer = Writer(folder, prompt, sampling, tier, progress)
        try:
            with Watch(model, progress):
                writer.write(model, device)
        finally:
            progress.stop()
        _report(arguments, writer, weights, progress)
        tier.close(discard=True)


def _loaded(folder: Folder, tier: TierManager, progress: Progress) -> nn.Module:
    from tiermem.loading.load import load_made

    if not folder.is_byte_gpt:
        import transformers

        # Its advice is about generate(), which users do not call here.
        quiet: Any = transformers.logging.set_verbosity_error
        quiet()
    if folder.adapters is None:
        return load_made(folder.model, folder.path, tier=tier, tell=progress.print)
    from tiermem import load_adapters
    from tiermem.lora.files import read_settings
    from tiermem.storage.checkpoint.folder import ADAPTERS

    progress.print(f"{folder.adapters} has adapters on {folder.path}")
    lora = read_settings(folder.adapters / ADAPTERS)
    model = load_made(folder.model, folder.path, tier=tier, tell=progress.print, lora=lora)
    load_adapters(model, folder.adapters)
    return model.eval()


class Writer:
    """Writes the text, and takes the time.

    Args:
        folder: The model's folder.
        prompt: Tokens that come before.
        sampling: How tokens are chosen.
        tier: The tiers.
        progress: Told of each token.
    """

    def __init__(
        self,
        folder: Folder,
        prompt: list[int],
        sampling: Sampling,
        tier: TierManager,
        progress: Progress,
    ) -> None:
        from tiermem.cli.tokens import TextStream

        self.count = 0
        self.seconds_to_first = 0.0
        self.seconds_after = 0.0
        self._prompt = prompt
        self._sampling = sampling
        self._tier = tier
        self._progress = progress
        self._text = TextStream(folder.tokens, prompt)
        self._began = 0.0

    @property
    def tier(self) -> TierManager:
        """The tiers."""
        return self._tier

    @property
    def tokens_per_second(self) -> float:
        """Speed after the first token."""
        return (self.count - 1) / self.seconds_after if self.seconds_after else 0.0

    def write(self, model: nn.Module, device: str) -> None:
        """Writes everything."""
        from tiermem.cli.generation import write_on

        self._began = time.perf_counter()
        write_on(model, self._prompt, device, self._sampling, self._take)
        self._print(self._text.end() + "\n")

    def _take(self, token: int) -> None:
        now = time.perf_counter()
        self.count += 1
        if self.count == 1:
            self.seconds_to_first = now - self._began
            self._began = now
            self._tier.reset_stats()  # the bound is on the tokens that come after it
        self.seconds_after = now - self._began if self.count > 1 else 0.0
        self._progress.token(self.count, self._sampling.tokens, self.tokens_per_second)
        self._print(self._text.add(token))

    @staticmethod
    def _print(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()


def _report(
    arguments: argparse.Namespace, writer: Writer, weights: int, progress: Progress
) -> None:
    from tiermem.cli.bound import bound_of

    first = f"first token after {writer.seconds_to_first:.2f} s"
    if writer.count < 2:
        progress.print(first)
        return
    speed = writer.tokens_per_second
    bound = bound_of(arguments, weights, writer.tier.stats(), writer.count - 1, speed)
    line = f"{first}, then {speed:.3g} tokens/s"
    if bound.tokens_per_second is None:
        progress.print(f"{line}; {bound.reason}")
    else:
        progress.print(f"{line}; bound {bound.tokens_per_second:.3g} tokens/s ({bound.reason})")


class Progress(AbstractContextManager["Progress"]):
    """One line that says what goes on: drawn anew on a terminal, else a line now and then.

    Args:
        console: Of standard error.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = console.is_terminal and not console.quiet
        # On one terminal a line that is drawn anew would go through the text.
        self._apart = not sys.stdout.isatty()
        self._status = console.status("starting") if self._live else None

    def __enter__(self) -> Progress:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.stop()

    def say(self, text: str) -> None:
        """Shows the present stage."""
        if self._status is None:
            self.print(text)
        else:
            self._status.update(text)

    def part(self, what: str, done: int, whole: int) -> None:
        """Shows how far a stage is."""
        every = max(1, whole // _PLAIN_LINES)
        if self._status is not None or done % every == 0 or done == whole:
            self.say(f"{what} {done}/{whole}")

    def token(self, count: int, most: int, speed: float) -> None:
        """Shows that there is a token."""
        if self._status is None:
            return
        if self._apart:
            self._status.update(f"token {count}/{most}, {speed:.3g} tokens/s")
        elif count == 1:
            self._status.stop()

    def print(self, text: str) -> None:
        """Prints a line that stays."""
        self._console.print(text, soft_wrap=True, markup=False)

    def stop(self) -> None:
        """Takes the line away."""
        if self._status is not None:
            self._status.stop()


class Watch(AbstractContextManager["Watch"]):
    """Tells of the layers that the prompt goes through, until it is through.

    Args:
        model: The model, loaded.
        progress: Notified of each stage.
    """

    def __init__(self, model: nn.Module, progress: Progress) -> None:
        from torch import nn

        lists = [each for each in model.modules() if isinstance(each, nn.ModuleList)]
        layers = max(lists, key=len, default=nn.ModuleList())
        self._progress = progress
        self._count = len(layers)
        self._hooks = [
            layer.register_forward_hook(self._hook(number))
            for number, layer in enumerate(layers, 1)
        ]

    def __exit__(self, *_: Any) -> None:
        for hook in self._hooks:
            hook.remove()

    def _hook(self, number: int) -> Any:
        def passed(*_: Any) -> None:
            self._progress.part("reading the prompt: layer", number, self._count)
            if number == self._count:
                self.__exit__()

        return passed
