"""Activations below HBM: rows of forward and backward beside a plain model."""

from __future__ import annotations

import copy
import statistics
from functools import partial
from typing import Any

import torch
from llama import SHAPES, deterministic, give_back, peak_of
from profile_step import profile_step
from raw_train import BothWays
from train_rows import Row, bytes_of, reasons, spread_of
from training import Loop, WithoutStep, opened, taking_turns

from tiermem.config import parse_size


class Offload:
    """The rows of ``residual`` and ``saved``.

    Args:
        bench: Builds models and loops, and keeps rows.
    """

    def __init__(self, bench: Any) -> None:
        self.bench = bench
        self.options, self.device, self.clock = bench.options, bench.device, bench.clock

    def activations(self, what: str, *, recompute: bool) -> None:
        """Measures forward and backward, weights and gradients in HBM, beside a plain model."""
        tokens, micro = self.bench.tokens_and_micro()[0]
        for layers in self.options.layers or [SHAPES[self.options.shape]["num_hidden_layers"]]:
            give_back(self.device)
            self.offloaded(what, layers, tokens, micro, recompute)
            self.bench.reached(f"{what}, {layers} layers")

    def offloaded(self, what: str, layers: int, tokens: int, micro: int, recompute: bool) -> None:
        """Measures one number of layers; its row is kept once it has times, and at the end."""
        options = self.options
        plain = WithoutStep(self.bench.build(recompute, layers))
        model = copy.deepcopy(plain.model)  # far quicker than the same random weights once more
        self.bench.reached("models built")
        weights = sum(p.numel() * p.element_size() for p in model.parameters())
        row: Row = {"tokens": tokens, "micro": micro, "layers": layers}
        hbm = int(weights * 2 * 1.02) + (64 << 20)
        dram = parse_size(options.dram or "4GiB")
        with opened(
            self.device,
            hbm,
            dram,
            policy={"params": "hbm", "grads": "hbm", "activations": "dram"},
            activation_min=options.activation_min,
        ) as tier:
            trainer = WithoutStep(tier.wrap(model))
            give_back(self.device)
            loops = [self.bench.loop(each, tokens, micro) for each in (plain, trainer)]
            row["equal"] = self.same_gradients(loops, plain, trainer)
            self.bench.reached("compared")
            for loop in loops:
                loop.run(options.warm)
            self.clock.wait()
            tier.reset_stats()
            times = taking_turns(loops, options.repeats, options.steps)
            stats, made = tier.stats(), options.repeats * (options.steps + 1)
            row |= spread_of(times, loops)
            row |= self.saved_tensors(stats, made, layers)
            row |= reasons(stats)
            self.bench.keep(what, row)
            self.bench.reached("timed")
            row |= self.activation_bound(tier, stats, made, loops, times)
            row |= self.peaks(loops)
            if "tiermem activations GB" in row:
                allowed = row["GB of two windows and a layer"]
                row["of the activation budget"] = row["tiermem activations GB"] / allowed
            self.bench.keep(what, row)
            if options.profile:
                profile_step(partial(loops[1].run, 1), options.profile, self.device)

    def same_gradients(self, loops: list[Loop], plain: WithoutStep, trainer: WithoutStep) -> bool:
        """Compares loss and every gradient of one step under deterministic kernels."""
        model, other = trainer.model, plain.model
        losses = []
        with deterministic():
            for each, loop in zip((other, model), loops, strict=True):
                loss = each(loop._data.micro_batch(0))
                loss.backward()
                losses.append(loss.item())
                del loss
        equal = losses[0] == losses[1]
        theirs = dict(other.named_parameters())
        for name, param in model.named_parameters():  # each gradient comes by itself, in HBM
            equal = equal and bool(torch.equal(param.grad, theirs[name].grad))
        plain.step()
        trainer.step()
        return equal

    def saved_tensors(self, stats: Any, made: int, layers: int) -> Row:
        """Returns what became of saved tensors in a step."""
        found = stats.activations
        return {
            "GB saved below": found.offloaded_bytes / made / 1e9,
            "GB of a layer": found.offloaded_bytes / made / layers / 1e9,
            "kept": found.kept / made,
            "reused": found.reused / made,
            "fetched late": found.fetched_late / made,
            "GB of two windows and a layer": 5 * found.offloaded_bytes / made / layers / 1e9,
            "DRAM of them GB": found.peak / 1e9,
        }

    def activation_bound(
        self, tier: Any, stats: Any, made: int, loops: list[Loop], times: list[list[float]]
    ) -> Row:
        """Measures the copies alone; they go down in forward and up in backward."""
        repeats = self.options.raw_repeats
        down, up = bytes_of(stats, "hbm->dram", made), bytes_of(stats, "dram->hbm", made)
        # a part of a step's bytes is enough to know the speed
        part = min(1.0, parse_size(self.options.raw_nbytes) / max(up, down, 1))
        found = []
        with BothWays(tier) as raw:
            for ways in ((0, int(down * part)), (int(up * part), 0)):
                seconds = self.clock.time(partial(raw.copy, *ways), repeats, warm=1)
                found.append(statistics.median(seconds) / part)
        downs, ups = found
        split, took = loops[0].split, statistics.median(times[1])
        forward, backward = statistics.median(split.forward), statistics.median(split.backward)
        phases = max(forward, downs) + max(backward, ups)
        whole = max(statistics.median(times[0]), downs + ups)
        return {
            "GB down": down / 1e9,
            "GB up": up / 1e9,
            "raw down s": downs,
            "raw up s": ups,
            "bound s": whole,
            "of bound": whole / took,
            "of bound by pass": phases / took,
        }

    def peaks(self, loops: list[Loop]) -> Row:
        """Returns the device's memory for activations: the peak beyond what there is at rest.

        The tiered run's gradients are in its arena, so they do not count; the plain one's do.
        """
        if self.device.type != "cuda":
            return {}
        row = {}
        names = ("resident activations and gradients GB", "tiermem activations GB")
        for name, loop in zip(names, loops, strict=True):
            give_back(self.device)
            rest = torch.cuda.memory_allocated(self.device)
            peak = peak_of(partial(loop.run, 1), self.device)
            row[name] = (peak.allocated - rest) / 1e9
        return row
