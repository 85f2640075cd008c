"""accelerate's and diffusers' own offloading beside ours: right, or an error saying to choose."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support_nn import same_bits
from torch import nn

import tiermem

accelerate = pytest.importorskip("accelerate")
CPU = torch.device("cpu")
X = torch.linspace(-1, 1, 64).reshape(2, 32)


def build() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(*[nn.Linear(32, 32) for _ in range(4)])


def group_offload(model: nn.Module, **options: Any) -> None:
    hooks = pytest.importorskip("diffusers.hooks")
    hooks.apply_group_offloading(model, onload_device=CPU, offload_device=CPU, **options)


def dispatch(model: nn.Module, folder: Path) -> None:
    places = {"0": "cpu", "1": "disk", "2": "disk", "3": "cpu"}
    accelerate.dispatch_model(model, places, main_device="cpu", offload_dir=str(folder))


OFFLOADS: dict[str, Callable[[nn.Module, Path], Any]] = {
    "cpu_offload": lambda model, _: accelerate.cpu_offload(model, execution_device="cpu"),
    "disk_offload": lambda model, to: accelerate.disk_offload(
        model, str(to), execution_device="cpu"
    ),
    "dispatch_model": dispatch,
}
GROUPS: dict[str, Callable[[nn.Module, Path], Any]] = {
    "cpu_offload_with_hook": lambda model, _: accelerate.cpu_offload_with_hook(
        model, execution_device="cpu"
    ),
    "blocks": lambda model, _: group_offload(
        model, offload_type="block_level", num_blocks_per_group=1
    ),
    "leaves": lambda model, _: group_offload(model, offload_type="leaf_level"),
    "leaves on disk": lambda model, to: group_offload(
        model, offload_type="leaf_level", offload_to_disk_path=str(to)
    ),
}
HARMLESS: dict[str, Callable[[nn.Module], Any]] = {
    "one device": lambda model: accelerate.dispatch_model(model, {"": "cpu"}, main_device="cpu"),
    "a hook": lambda model: accelerate.hooks.add_hook_to_module(
        model, accelerate.hooks.AlignDevicesHook(execution_device="cpu")
    ),
    "prepare": lambda model: accelerate.Accelerator(cpu=True).prepare(model),
}


@pytest.mark.parametrize("name", OFFLOADS)
def test_offloading_a_wrapped_model_says_to_choose(name: str, tmp_path: Path) -> None:
    model, plain = build(), build()
    with tiermem.TierManager("cpu", hbm="16KiB", dram="1MiB") as tier:
        tier.wrap(model)
        # accelerate looks for tied weights by their addresses before it offloads anything
        said = r"offloading.*after tier\.unwrap|addresses of tensors in the tiers"
        with pytest.raises(tiermem.ParameterError, match=said):
            OFFLOADS[name](model, tmp_path)
        assert same_bits(model(X), plain(X))


@pytest.mark.parametrize("name", [*OFFLOADS, *GROUPS])
def test_wrapping_an_offloaded_model_says_to_choose(name: str, tmp_path: Path) -> None:
    model, plain = build(), build()
    {**OFFLOADS, **GROUPS}[name](model, tmp_path)
    with tiermem.TierManager("cpu", hbm="16KiB", dram="1MiB") as tier:
        with pytest.raises(tiermem.WrapError, match="use one of the two"):
            tier.wrap(model)
    assert same_bits(model(X), plain(X))


@pytest.mark.parametrize("name", HARMLESS)
@pytest.mark.parametrize("first", ["wrap", "hook"])
def test_hooks_that_move_nothing_work(name: str, first: str) -> None:
    model, plain = build(), build()
    with tiermem.TierManager("cpu", hbm="40KiB", dram="1MiB") as tier:
        if first == "wrap":
            HARMLESS[name](tier.wrap(model))
        else:
            HARMLESS[name](model)
            tier.wrap(model)
        for each in (model, plain):
            each(X).square().sum().backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert same_bits(ours.grad.clone(), theirs.grad)
