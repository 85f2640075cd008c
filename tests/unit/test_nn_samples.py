"""Every module sample and every optimizer sample that torch has, in the tiers bit for bit."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support_examples import examples
from support_nn import Tiers, compare_training, seed
from torch import nn

import tiermem

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    modules = pytest.importorskip("torch.testing._internal.common_modules")
    optimizers = pytest.importorskip("torch.testing._internal.common_optimizers")

pytestmark = pytest.mark.filterwarnings("ignore")
_MOST = 2
_EACH = examples(10, 1 << 20)
_STEPPED = 100
_LAZY = "run one batch through the module before tier.wrap"


def _dtype_of(info: Any) -> torch.dtype:
    dtypes = info.dtypes or (torch.float32,)
    return torch.float32 if torch.float32 in dtypes else next(iter(dtypes))


def _samples(info: Any, dtype: torch.dtype) -> Iterator[tuple[bool, Any]]:
    for training in (True, False) if info.train_and_eval_differ else (True,):
        seed(1)
        found = info.module_inputs_func(
            info, device="cpu", dtype=dtype, requires_grad=True, training=training
        )
        for sample in found:
            if sample.forward_input is not None:
                yield training, sample


def _compare(
    info: Any, training: bool, sample: Any, dtype: torch.dtype, tiers: Tiers, **options: Any
) -> None:
    made, given = sample.constructor_input, sample.forward_input

    def build() -> nn.Module:
        return info.module_cls(*made.args, **dict(made.kwargs)).to(dtype)

    if info.module_cls.__name__.startswith("Lazy"):
        with pytest.raises(tiermem.WrapError, match=_LAZY):
            compare_training(build, lambda: (given.args, given.kwargs), tiers, train=training)
        return
    compare_training(build, lambda: (given.args, given.kwargs), tiers, train=training, **options)


@pytest.mark.parametrize("info", modules.module_db, ids=lambda info: info.name)
@pytest.mark.one_in(3)
def test_some_samples_of_every_module(info: Any) -> None:
    dtype = _dtype_of(info)
    samples = list(_samples(info, dtype))
    step = max(1, len(samples) // _MOST)
    start = zlib.crc32(info.name.encode()) % step
    for training, sample in samples[start::step][:_MOST]:
        _compare(info, training, sample, dtype, Tiers("dram"))


@pytest.mark.parametrize("info", modules.module_db, ids=lambda info: info.name)
@pytest.mark.one_in(2)
def test_a_sample_of_every_module_with_what_it_saves_below_hbm(info: Any) -> None:
    dtype = _dtype_of(info)
    samples = list(_samples(info, dtype))
    policy = tiermem.Policy("dram", "dram", "dram", "dram", activations="dram")
    ahead = zlib.crc32(info.name.encode()) % 2 * 4096
    options = {"activation_min": 1, "activation_ahead": ahead}
    training, sample = samples[len(samples) // 3]
    _compare(info, training, sample, dtype, Tiers("dram", policy=policy, options=options))


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("info", modules.module_db, ids=lambda info: info.name)
def test_many_samples_of_every_module(info: Any, tmp_path: Any) -> None:
    dtype = _dtype_of(info)
    disk = Tiers("nvme", dram=1 << 20, nvme=str(tmp_path), policy="nvme")
    samples = list(_samples(info, dtype))
    for index, (training, sample) in enumerate(samples[:: -(-len(samples) // _EACH)]):
        # One loss has 857 samples: what an optimizer does with the gradients is seen by then.
        options = {} if index < _STEPPED else {"optimizer": None, "steps": 2}
        tiers = disk if index % 4 == 0 else Tiers("dram")
        _compare(info, training, sample, dtype, tiers, **options)


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("info", modules.module_db, ids=lambda info: info.name)
def test_samples_in_other_dtypes(info: Any) -> None:
    for dtype in sorted(info.dtypes or (), key=str):
        if dtype is _dtype_of(info):
            continue
        for training, sample in list(_samples(info, dtype))[:3]:
            try:
                seed(1)
                module = info.module_cls(
                    *sample.constructor_input.args, **sample.constructor_input.kwargs
                ).to(dtype)
                module(*sample.forward_input.args, **sample.forward_input.kwargs)
            except (RuntimeError, NotImplementedError, ValueError):
                continue  # the plain module cannot do it on this device
            _compare(info, training, sample, dtype, Tiers("dram"))


def _net(info: Any) -> tuple[Any, Any]:
    if info.only_supports_sparse_grads:
        return (
            lambda: nn.Sequential(nn.Embedding(50, 20, sparse=True)),
            lambda: ((torch.randint(0, 50, (4,)),), {}),
        )
    bias = info.optim_cls.__name__ != "Muon"  # it takes matrices only
    layers = [(20, 30), (30, 30), (30, 7)]
    return (
        lambda: nn.Sequential(*[nn.Linear(*size, bias=bias) for size in layers]),
        lambda: ((torch.randn(3, 20),), {}),
    )


def _step_some(info: Any, pick: slice, tiers: Tiers) -> None:
    build, inputs = _net(info)
    for sample in info.optim_inputs_func(device="cpu")[pick]:
        settings = (info.optim_cls, dict(sample.kwargs))
        if info.step_requires_closure:
            with pytest.raises(tiermem.StepError, match="without a closure"):
                compare_training(build, inputs, tiers, optimizer=settings)
            continue
        compare_training(build, inputs, tiers, optimizer=settings, steps=4)


@pytest.mark.parametrize("info", optimizers.optim_db, ids=lambda info: info.optim_cls.__name__)
@pytest.mark.one_in(2)
def test_some_settings_of_every_optimizer(info: Any) -> None:
    _step_some(info, slice(None, None, 3), Tiers("dram"))


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("info", optimizers.optim_db, ids=lambda info: info.optim_cls.__name__)
def test_every_setting_of_every_optimizer(info: Any, tmp_path: Any) -> None:
    _step_some(info, slice(None), Tiers("dram"))
    _step_some(info, slice(None), Tiers("nvme", 1 << 20, str(tmp_path), "nvme"))


@pytest.mark.parametrize("how", ["foreach", "fused"])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
def test_the_ways_a_step_is_computed(kind: Any, how: str) -> None:
    compare_training(
        lambda: nn.Sequential(nn.Linear(20, 30), nn.Linear(30, 7)),
        lambda: ((torch.randn(3, 20),), {}),
        Tiers("dram"),
        optimizer=(kind, {"lr": 0.01, how: True}),
    )
