"""How each of the first forwards of a model goes, with defaults, a quarter of its bytes in HBM.

A caller who measures makes one or two calls to warm up and times the next few, so what counts is
how soon passes are no longer measured, planned and decided. Each call is timed by itself, the
device idle before it::

    python benchmarks/bench_calls.py llama vit layers --tokens 1 2048 --calls 8 --out calls.json
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from common import report
from llama import give_back, nbytes_of
from raw import raw_copy
from zoo import KINDS, SETS, Draw

import tiermem


class Watch:
    """Counts the plans that a manager makes, and the seconds that takes."""

    def __init__(self, tier: tiermem.TierManager) -> None:
        """Watches the manager of a tier."""
        self.manager: Any = tier._manager
        self.seconds = 0.0
        maker = self.manager.prefetcher._maker
        make = maker.make

        def timed(*args: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return make(*args, **options)
            finally:
                self.seconds += time.perf_counter() - began

        maker.make = timed

    def how(self) -> str:
        """Returns how the pass under way goes."""
        run = self.manager.replay.run
        how = "decided" if run is None else "laid out" if run.arranged else "recorded"
        return f"{how}, measured" if self.manager.parts.pass_timer.pending else how

    def moved(self) -> int:
        """Returns the bytes moved so far."""
        return sum(self.manager.parts.counters.bytes_by_link().values())  # stats() would measure


def seconds_of(call: Callable[[], Any], device: torch.device) -> tuple[float, float]:
    """Returns the seconds of a call to its end on the device, and to its return."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    began = time.perf_counter()
    call()
    returned = time.perf_counter()
    wait()
    return time.perf_counter() - began, returned - began


def measure(name: str, options: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """Measures one model; returns a row for each length."""
    kind = KINDS[name]
    torch.manual_seed(0)
    model = kind.build(options.set, device)
    nbytes = nbytes_of(iter([*model.parameters(), *model.buffers()]))
    hbm = int(nbytes * options.share) // 4096 * 4096
    draws = {
        tokens: kind.given(model, tokens, Draw(device, tokens), False) for tokens in options.tokens
    }
    with torch.no_grad():
        inside = {
            tokens: statistics.median(
                seconds_of(lambda given=given: model(**given), device)[0] for _ in range(8)
            )
            for tokens, given in draws.items()
        }
    give_back(device)
    rows = []
    with tiermem.TierManager(device=device, hbm=hbm) as tier, torch.no_grad():
        model = tier.wrap(model)
        give_back(device)
        copy = raw_copy(tier, nbytes - hbm, "")
        raw = statistics.median(seconds_of(copy, device)[0] for _ in range(3))
        watch = Watch(tier)
        for tokens, given in draws.items():
            bound, calls = max(inside[tokens], raw), []
            for _ in range(options.calls):
                before, watch.seconds = watch.moved(), 0.0
                took, host = seconds_of(lambda given=given: model(**given), device)
                text = f"{bound / took:.2f} ({1e3 * took:.1f} ms, {watch.how()}"
                text += f", plan {1e3 * watch.seconds:.0f} ms)" if watch.seconds else ")"
                calls.append((text, host, watch.moved() - before))
            rows.append(
                {
                    "model": name,
                    "tokens": tokens,
                    "GB": nbytes / 1e9,
                    "in HBM ms": 1e3 * inside[tokens],
                    "raw ms": 1e3 * raw,
                    **{f"call {number + 1}": text for number, (text, _, _) in enumerate(calls)},
                    "host ms, last": 1e3 * calls[-1][1],
                    "GB moved, last": calls[-1][2] / 1e9,
                }
            )
        tier.close(discard=True)
    return rows


def main() -> None:
    """Measures the models that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("models", nargs="*", default=["llama", "vit", "layers"], choices=[*KINDS])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 2048])
    parser.add_argument("--calls", type=int, default=8, help="of each length")
    parser.add_argument("--set", choices=SETS, default="quick", help="sizes of the models")
    parser.add_argument("--share", type=float, default=0.25, help="of the bytes, in HBM")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", help="JSON file; the same as Markdown beside it")
    options = parser.parse_args()
    device = torch.device(options.device)
    rows = []
    for name in options.models:
        rows += measure(name, options, device)
        give_back(device)
    title = "First forwards with defaults: share of max(in HBM, raw copy of what does not fit)"
    report(title, rows, options.out, tall=True)


if __name__ == "__main__":
    main()
