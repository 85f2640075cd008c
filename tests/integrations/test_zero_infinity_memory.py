"""Host memory is what the run needs: it always does, and next to none of it is left over."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from support_integrations import Decoder, batches, decoder
from torch import nn

import tiermem
import tiermem.integrations.zero_infinity as deepspeed

ZERO = "zero_optimization"
BELOW = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}


def tied() -> Decoder:
    model = decoder(4)
    model.head.weight = model.embed.weight
    return model


def half_frozen() -> Decoder:
    model = decoder(4)
    for layer in model.layers[:2]:
        layer.requires_grad_(False)
    return model


MODELS: dict[str, Callable[[], Decoder]] = {
    "plain": lambda: decoder(4),
    "tied": tied,
    "frozen": half_frozen,
    "odd": lambda: decoder(2, width=50),
}
FILES: dict[str, dict[str, Any]] = {
    "float32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16, gradients in float32": {
        "fp16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
    },
    "bf16, without masters": {
        "bf16": {
            "enabled": True,
            "bf16_master_weights_and_grads": True,
            "bf16_optimizer_states": True,
        }
    },
    "state alone": {ZERO: {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
    "weights alone": {ZERO: {"stage": 3, "offload_param": {"device": "cpu"}}},
    "on the host": {
        ZERO: {"stage": 3, **BELOW, "offload_optimizer": {"device": "cpu", "ratio": 1.0}}
    },
    "SGD": {"optimizer": {"type": "SGD", "params": {"lr": 1e-3, "momentum": 0.9}}},
}


def raw(own: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        ZERO: {"stage": 3, **BELOW},
        "tiermem": {"device": "cpu", **own},
        **more,
    }


def run(config: dict[str, Any], model: Decoder) -> tiermem.Stats:
    """One step; returns what it took."""
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[
        0
    ]
    try:
        for tokens in batches(1):
            engine.backward(engine(tokens).float())
            engine.step()
        found: tiermem.Stats = engine.tier.stats()
    finally:
        engine.destroy()
    return found


@pytest.mark.parametrize(
    ("model", "file"),
    [*zip(cycle(MODELS), FILES, strict=False), *zip(MODELS, cycle(["bf16"]), strict=False)],
)
def test_a_run_takes_what_is_asked_for_and_no_less(model: str, file: str) -> None:
    own = {"hbm": "4MiB", "overlap": "forward"}
    stats = run(raw(own, **FILES[file]), MODELS[model]())
    assert stats.peak["dram"] >= 0.9 * stats.budget["dram"]


def test_steps_inside_backward_have_host_memory_to_be_undone_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def dram(available: int, hbm: str = "1MiB", **more: Any) -> int:
        monkeypatch.setattr("tiermem.budgets.available_memory", lambda: available)
        config = raw({"hbm": hbm, **more}, bf16={"enabled": True})
        return int(deepspeed.explain(config, model=decoder(4)).manager["dram"])

    needed = dram(1 << 40, overlap="forward")
    assert 1.9 * needed < dram(1 << 40) < 2.1 * needed
    assert dram(3 * needed) == 3 * needed // 2  # half of what is available
    assert dram(3 * needed // 2) == needed  # and at least what is needed
    assert dram(1 << 40, hbm="64MiB") == dram(1 << 40, hbm="64MiB", overlap="forward")  # all fits
    assert dram(1 << 40, where="host") < 1.1 * needed


def test_what_a_parameter_takes_of_host_memory() -> None:
    """bf16 weight and gradient, float32 master and two moments: 16 bytes, and a part in 32."""
    elements = sum(p.numel() for p in decoder(4).parameters())
    for hbm, nbytes in (("8MiB", 16), (None, 14)):  # gradients stay in HBM where all has room
        own = {} if hbm is None else {"hbm": hbm}
        found = deepspeed.explain(raw(own, bf16={"enabled": True}), model=decoder(4))
        assert 1 < found.manager["dram"] / (nbytes * elements) < 1.1
        assert found.manager["policy"]["grads"] == ("dram" if hbm else "hbm")


def test_files_are_read_ahead_within_it(tmp_path: Path) -> None:
    """Whatever is in files, and however small its buffers: there is always room for it."""
    below = {"device": "nvme", "nvme_path": str(tmp_path)}
    small = {**below, "buffer_count": 1, "buffer_size": 0, "max_in_cpu": 0}
    section = {
        "stage": 3,
        "offload_param": small,
        "offload_optimizer": {**below, "buffer_count": 1},
    }
    stats = run(raw({"hbm": "1MiB"}, **{ZERO: {**section, "sub_group_size": 1}}), decoder(4))
    assert stats.budget["dram"] < 300 << 20
    assert stats.links["nvme->hbm"].nbytes > 0


def test_host_memory_that_is_not_there_is_refused_before_anything_moves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = decoder(2)
    before = model.head.weight.data_ptr()
    monkeypatch.setattr("tiermem.budgets.available_memory", lambda: 10_000)
    with pytest.raises(tiermem.CapacityError, match=r"needed .* 10,000 are available.*NVMe"):
        deepspeed.initialize(model=model, config=raw({"hbm": "8MiB"}, bf16={"enabled": True}))
    assert model.head.weight.data_ptr() == before
    assert model.head.weight.dtype is torch.float32
    explained = deepspeed.explain(raw({"hbm": "8MiB"}), model=model)
    assert "10,000 are available" in explained.refused


@pytest.mark.parametrize("budget", ["hbm", "dram", "nvme_bytes"])
def test_a_budget_that_does_not_do_is_refused_before_the_model_is_cast(
    budget: str, tmp_path: Path
) -> None:
    below = {"device": "nvme", "nvme_path": str(tmp_path)}
    files = {"stage": 3, "offload_param": below, "offload_optimizer": below}
    more = {ZERO: files} if budget == "nvme_bytes" else {}
    own = {"hbm": "2MiB", "dram": "16MiB", budget: 40_000}
    model = decoder(2)
    before = {name: (p.data_ptr(), p.clone()) for name, p in model.named_parameters()}
    with pytest.raises(tiermem.CapacityError, match=rf"tiermem\.{budget}: this run takes [\d,]+ "):
        deepspeed.initialize(model=model, config=raw(own, bf16={"enabled": True}, **more))
    for name, param in model.named_parameters():
        address, value = before[name]
        assert (param.data_ptr(), param.dtype) == (address, torch.float32)
        assert torch.equal(param, value)


def test_saved_tensors_may_have_what_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiermem.budgets.available_memory", lambda: 1 << 30)
    saved = {"activation_checkpointing": {"cpu_checkpointing": True}}
    plain, more = (
        deepspeed.explain(raw({"hbm": "8MiB"}, **extra), model=nn.Linear(300, 300)).manager["dram"]
        for extra in ({}, saved)
    )
    assert plain < 2 << 20
    assert more == (1 << 30) * 9 // 10
