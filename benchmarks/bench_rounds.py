"""How each of the first rounds of training goes, with defaults: seconds, and bytes moved.

A round is one step of the optimizer, after one backward or several. Each is timed by itself, the
device idle before and after it, from the very first one on: its forwards and backwards, and
``step()`` with ``zero_grad()``. Bytes are given as parts of the weights' bytes: with AdamW in the
weights' dtype four of them go down in a round, and up come three and what forward needs; each
backward more brings the gradients up and down once more. ``equal`` says whether the losses are
those of the model in HBM. A model that fails is a row that says so::

    python benchmarks/bench_rounds.py layers vit llama3b --rounds 8 --out rounds.json
    python benchmarks/bench_rounds.py gpt2 --micro-batches 4 --device cpu --set tiny --tokens 64
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from common import report, rows_of
from llama import give_back, nbytes_of
from torch import nn
from zoo import KINDS
from zoo_kind import SETS, Draw, Kind, loss_of

import tiermem

Row = dict[str, Any]
LEARNING_RATE = 1e-5


class Rounds:
    """Makes rounds of one model, and measures them."""

    def __init__(
        self,
        kind: Kind,
        model: nn.Module,
        optimizer: Any,
        options: argparse.Namespace,
        device: torch.device,
    ) -> None:
        """Prepares the inputs.

        Args:
            kind: Of the model.
            model: In training mode.
            optimizer: Of its parameters.
            options: Of the command line.
            device: Where it runs.
        """
        self.model, self.optimizer = model, optimizer
        self.count = options.micro_batches
        self.given = kind.given(model, options.tokens, Draw(device, options.tokens), True)
        self.wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
        torch.manual_seed(0)  # dropout

    def make(self) -> tuple[float, float, float]:
        """Makes one; returns its loss, the seconds of its passes, and those of its step."""
        self.wait()
        began = time.perf_counter()
        for _ in range(self.count):
            loss = loss_of(self.model(**self.given)) / self.count
            loss.backward()
        self.wait()
        passed = time.perf_counter()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.wait()
        return loss.item(), passed - began, time.perf_counter() - passed


def measure(name: str, options: argparse.Namespace, device: torch.device) -> Row:
    """Measures one model; returns its row."""
    kind = KINDS[name]

    def build() -> nn.Module:
        torch.manual_seed(0)
        model = kind.build(options.set, device).train()
        if options.recompute:
            model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
        return model

    model = build()
    nbytes = nbytes_of(iter([*model.parameters(), *model.buffers()]))
    plain = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    resident = Rounds(kind, model, plain, options, device)
    expected = [resident.make() for _ in range(options.rounds)]
    del model, plain, resident
    give_back(device)
    hbm = options.hbm or int(options.share * nbytes) // 4096 * 4096
    row: Row = {"model": name, "tokens": options.tokens, "backwards": options.micro_batches}
    row |= {"GB": nbytes / 1e9, "in HBM ms, last": 1e3 * sum(expected[-1][1:])}
    losses = []
    with tiermem.TierManager(device=device, hbm=hbm) as tier:
        began = time.perf_counter()
        model = tier.wrap(build())
        give_back(device)
        wrapped = time.perf_counter()
        optimizer = tier.optimizer(model, torch.optim.AdamW, lr=LEARNING_RATE)
        row |= {"wrap s": wrapped - began, "optimizer s": time.perf_counter() - wrapped}
        rounds = Rounds(kind, model, optimizer, options, device)
        counters = tier._manager.parts.counters
        for number in range(1, options.rounds + 1):
            before = counters.bytes_by_link()
            loss, passes, step = rounds.make()
            after = counters.bytes_by_link()
            up, down = (
                (after.get(link, 0) - before.get(link, 0)) / nbytes
                for link in ("dram->hbm", "hbm->dram")
            )
            text = f"{1e3 * (passes + step):.0f} ms (step {1e3 * step:.0f})"
            row[f"round {number}"] = f"{text}, {up:.1f} up, {down:.1f} down"
            losses.append(loss)
        tier.close(discard=True)
    return row | {"equal": losses == [loss for loss, _, _ in expected]}


def main() -> None:
    """Measures the models that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("models", nargs="*", default=["layers", "vit"], choices=[*KINDS])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--micro-batches", type=int, default=1, help="backwards in each round")
    parser.add_argument("--recompute", action="store_true", help="layers again in backward")
    parser.add_argument("--set", choices=SETS, default="full", help="sizes of the models")
    parser.add_argument("--share", type=float, default=0.5, help="of the bytes, in HBM")
    parser.add_argument("--hbm", help="a budget, instead of a share")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", help="JSON file; the same as Markdown beside it")
    options = parser.parse_args()
    device = torch.device(options.device)
    rows = rows_of(
        options.models, lambda name: [measure(name, options, device)], lambda: give_back(device)
    )
    report("First rounds of training with defaults", rows, options.out, tall=True)


if __name__ == "__main__":
    main()
