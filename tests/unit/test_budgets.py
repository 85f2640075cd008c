"""``budgets_for`` says what a run takes, to the byte, and looks at shapes alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tiermem

POLICY = dict.fromkeys(("params", "grads", "master", "optimizer"), "dram")
MASTERS = {"dtype": torch.bfloat16, "master_dtype": torch.float32}


class Model(nn.Module):
    """Tied weights, a frozen layer, a large buffer, and one that stays."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 40)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(40, 90), nn.Linear(90, 40)) for _ in "abc"
        )
        self.head = nn.Linear(40, 50, bias=False)
        self.head.weight = self.embed.weight
        self.layers[0].requires_grad_(False)
        self.register_buffer("table", torch.zeros(90_000))
        self.register_buffer("scale", torch.ones(3))


def opened(found: tiermem.Budgets, policy: Any = POLICY, **more: Any) -> tiermem.TierManager:
    return tiermem.TierManager("cpu", hbm=found.hbm, dram=found.dram, policy=policy, **more)


@pytest.mark.parametrize(
    ("cls", "settings", "more"),
    [
        (torch.optim.AdamW, {"lr": 1e-3}, {}),
        (torch.optim.AdamW, {"amsgrad": True}, MASTERS),
        (torch.optim.SGD, {"momentum": 0.9}, {**MASTERS, "grad_dtype": torch.float32}),
        (torch.optim.Adafactor, {}, {}),
        (torch.optim.Adagrad, {}, {}),
        (torch.optim.Adagrad, {}, MASTERS),
        (torch.optim.AdamW, {}, {"where": "host"}),
        (torch.optim.AdamW, {}, {"overlap": "backward"}),
    ],
)
def test_what_is_taken_is_what_was_said(cls: Any, settings: Any, more: dict[str, Any]) -> None:
    model = Model()
    found = tiermem.budgets_for(
        model, cls, device="cpu", hbm="4MiB", policy=POLICY, **more, **settings
    )
    more = {key: value for key, value in more.items() if key != "dtype"}
    if "master_dtype" in more:
        for param in model.parameters():
            param.data = param.data.bfloat16()
    with opened(found) as tier:
        tier.wrap(model)
        tier.optimizer(model, cls, **more, **settings)
        assert tier.stats().used["dram"] == found.dram


def test_homes_in_hbm_and_in_files(tmp_path: Path) -> None:
    below = {"params": "nvme", "grads": "hbm", "master": "dram", "optimizer": "nvme"}
    found = tiermem.budgets_for(
        Model(), torch.optim.AdamW, device="cpu", hbm="4MiB", nvme=True, policy=below, **MASTERS
    )
    model = Model()
    for param in model.parameters():
        param.data = param.data.bfloat16()
    with opened(found, below, nvme=tmp_path) as tier:
        tier.wrap(model)
        tier.optimizer(model, torch.optim.AdamW, master_dtype=torch.float32)
        used = tier.stats().used
        assert used["nvme"] == found.nvme_bytes
        assert used["dram"] <= found.dram


def test_the_staging_of_files_counts_where_no_home_is_in_dram(tmp_path: Path) -> None:
    found = tiermem.budgets_for(
        Model(), torch.optim.AdamW, device="cpu", hbm="4MiB", nvme=True, policy="nvme"
    )
    assert found.dram > 0
    model = Model()
    with opened(found, "nvme", nvme=tmp_path) as tier:
        tier.wrap(model)
        tier.optimizer(model, torch.optim.AdamW)
        used = tier.stats().used
        assert used["nvme"] == found.nvme_bytes
        assert used["dram"] <= found.dram
    with pytest.raises(tiermem.CapacityError, match=rf"give dram= at least .*\({found.dram} bytes"):
        tiermem.TierManager(device="cpu", hbm=found.hbm, dram=found.dram - 4096, nvme=tmp_path)


def test_state_that_is_made_with_the_optimizer_counts_for_what_is_frozen() -> None:
    """The frozen layer is most of it, and its weights and state are there at once."""

    def model() -> nn.Module:
        large = nn.Linear(256, 256, bias=False).requires_grad_(False)
        return nn.Sequential(nn.Linear(256, 8), nn.Linear(8, 256), large, nn.Linear(256, 8))

    def said(hbm: int) -> tiermem.Budgets:
        return tiermem.budgets_for(
            model(), torch.optim.Adagrad, device="cpu", hbm=hbm, policy=POLICY
        )

    least = said(64 << 10).least_hbm
    least = said(least).least_hbm
    assert said(least).least_hbm == least == 2 * 256 * 256 * 4
    for short in (0, 4096):
        trained = model()
        with opened(said(least - short)) as tier:
            tier.wrap(trained)
            if short:
                with pytest.raises(tiermem.CapacityError, match=rf"hbm= at least .*\({least} b"):
                    tier.optimizer(trained, torch.optim.Adagrad)
                continue
            optimizer = tier.optimizer(trained, torch.optim.Adagrad)
            trained(torch.ones(2, 256)).sum().backward()
            optimizer.step()


def test_nothing_is_moved_and_the_least_of_hbm_is_said() -> None:
    model = Model()
    before = [(p.data_ptr(), p.dtype, p.requires_grad) for p in model.parameters()]
    found = tiermem.budgets_for(
        model, torch.optim.AdamW, device="cpu", hbm="64KiB", policy=POLICY, dtype=torch.float16
    )
    assert [(p.data_ptr(), p.dtype, p.requires_grad) for p in model.parameters()] == before
    assert found.least_hbm > found.hbm == 64 << 10
    assert found.all_in_hbm > found.dram > 0
    assert found.available > 0
    forward = tiermem.budgets_for(model, device="cpu", hbm="4MiB", policy=POLICY)
    assert forward.dram < tiermem.budgets_for(
        model, torch.optim.SGD, device="cpu", hbm="4MiB", policy=POLICY
    ).dram  # fmt: skip


def test_the_least_of_hbm_is_with_the_blocks_that_it_has_itself() -> None:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64)) for _ in range(5)]
    model = nn.Sequential(nn.Embedding(131, 64), *layers, nn.Linear(64, 131))
    policy = {"params": "dram", "grads": "hbm", "optimizer": "dram"}

    def said(hbm: int) -> tiermem.Budgets:
        cls = torch.optim.Adam
        return tiermem.budgets_for(model, cls, device="cpu", hbm=hbm, policy=policy, amsgrad=True)

    for hbm in (64 << 10, 4 << 20):
        least = said(hbm).least_hbm
        assert (least > hbm) == (hbm == 64 << 10)
        assert said(least).least_hbm <= least
    with opened(said(least), policy) as tier:
        optimizer = tier.optimizer(tier.wrap(model), torch.optim.Adam, amsgrad=True)
        model(torch.arange(4)).sum().backward()
        optimizer.step()


@pytest.mark.parametrize("where", ["host", "both"])
def test_steps_on_the_host_have_room_beside_homes_that_take_all_they_find(
    tmp_path: Path, where: Any
) -> None:
    policy = {"params": "auto", "grads": "nvme", "optimizer": "nvme"}
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(11)])
    settings = {"momentum": 0.9, "where": where}
    found = tiermem.budgets_for(
        model, torch.optim.SGD, device="cpu", hbm="256KiB", nvme=True, policy=policy, **settings
    )
    with opened(found, policy, nvme=tmp_path, nvme_bytes=found.nvme_bytes) as tier:
        tier.optimizer(tier.wrap(model), torch.optim.SGD, **settings)


def test_no_gpu_is_needed_where_budgets_depend_on_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for cls, hbm in ((torch.optim.AdamW, "4MiB"), (None, 4 << 20)):
        found = tiermem.budgets_for(Model(), cls, hbm=hbm, policy=POLICY)
        on_cpu = tiermem.budgets_for(Model(), cls, hbm=hbm, policy=POLICY, device="cpu")
        assert replace(found, available=0) == replace(on_cpu, available=0)
    for share in (None, "auto", "80%"):
        with pytest.raises(tiermem.ConfigError, match="torch sees no CUDA device"):
            tiermem.budgets_for(Model(), hbm=share)
    with pytest.raises(tiermem.ConfigError, match="torch sees no CUDA device"):
        tiermem.budgets_for(Model(), hbm="4MiB", device="cuda")


def test_what_cannot_be_wrapped_is_refused() -> None:
    with pytest.raises(tiermem.WrapError, match="meta"):
        tiermem.budgets_for(nn.Linear(2, 2, device="meta"), device="cpu", hbm="1MiB")
    with pytest.raises(tiermem.ConfigError, match="hbm is not a size"):
        tiermem.budgets_for(nn.Linear(2, 2), device="cpu", hbm="much")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"overlap": "sideways"}, "overlap='sideways': it is"),
        ({"where": "moon"}, "where='moon': a step is made on"),
        ({"dtype": torch.int8}, "dtype must be a floating dtype"),
        ({"dtype": "bf16"}, "dtype must be a floating dtype"),
        ({"buffer_dtype": 5}, "buffer_dtype must be a floating dtype"),
        ({"policy": "nvme"}, "there is none; give nvme=True"),
        ({"homes": {"0": "nvme"}}, "there is none; give nvme=True"),
    ],
    ids=str,
)
def test_settings_that_no_run_can_have_are_refused(settings: dict[str, Any], says: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(tiermem.ConfigError, match=says):
        tiermem.budgets_for(model, torch.optim.SGD, device="cpu", hbm="1MiB", **settings)


class Refuses(torch.optim.SGD):
    """Says why it refuses a dense gradient, and another thing of sparse ones."""

    def step(self, closure: Any = None) -> Any:
        sparse = self.param_groups[0]["params"][0].grad.is_sparse
        raise RuntimeError("it takes no sparse gradients" if sparse else "weight_decay is missing")


def test_a_class_that_cannot_be_tried_is_refused_for_its_own_reason() -> None:
    """Not for that of the second trial, with sparse gradients, which few classes take."""
    with pytest.raises(tiermem.StepError, match="weight_decay is missing"):
        tiermem.budgets_for(nn.Linear(4, 4), Refuses, device="cpu", hbm="1MiB")
    taken = tiermem.budgets_for(nn.Linear(4, 4), torch.optim.SparseAdam, device="cpu", hbm="1MiB")
    assert taken.least_hbm > 0
