"""Which setting of tiermem each option becomes, and where tensors then are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support_zero_infinity import TIGHT, build, config, loss_of, plain, started, train
from torch import nn
from torch.utils.checkpoint import checkpoint

import tiermem
import tiermem.integrations.zero_infinity as deepspeed

ZERO = "zero_optimization"
PARAM, STATE = f"{ZERO}.offload_param", f"{ZERO}.offload_optimizer"


def homes(engine: Any) -> dict[str, set[str]]:
    """The home tiers of each role's blocks."""
    found: dict[str, set[str]] = {}
    for row in engine.tier.residency():
        found.setdefault(str(row.role), set()).add(str(row.home))
    return found


def zero(stage: int, folder: Path | None = None, **devices: str) -> dict[str, Any]:
    """A section with these devices."""
    found: dict[str, Any] = {"stage": stage}
    for name, device in devices.items():
        found[f"offload_{name}"] = {"device": device}
        if device == "nvme":
            found[f"offload_{name}"]["nvme_path"] = str(folder)
    return found


@pytest.mark.parametrize(
    ("stage", "param", "optimizer", "expected"),
    [
        (1, "none", "none", {"param": "hbm", "grad": "hbm", "optimizer": "hbm"}),
        (2, "none", "cpu", {"param": "hbm", "grad": "dram", "optimizer": "dram"}),
        (3, "cpu", "none", {"param": "dram", "grad": "hbm", "optimizer": "hbm"}),
        (1, "cpu", "nvme", {"param": "dram", "grad": "dram", "optimizer": "nvme"}),
        *(
            (stage, home, home, {"param": tier, "grad": "dram", "optimizer": tier})
            for stage in (0, 1, 2, 3)
            for home, tier in (("cpu", "dram"), ("nvme", "nvme"))
        ),
    ],
)
def test_devices_are_homes_at_every_stage(
    stage: int, param: str, optimizer: str, expected: dict[str, str], tmp_path: Path
) -> None:
    """What DeepSpeed silently keeps on the GPU below stage 3 is offloaded here."""
    room = {**TIGHT, "hbm": "4MiB"}
    section = zero(stage, tmp_path, param=param, optimizer=optimizer)
    with started(config(tiermem=room, **{ZERO: section})) as engine:
        assert train(engine, 2) == plain(2)
        assert homes(engine) == {role: {home} for role, home in expected.items()}


def test_masters_live_where_state_does(tmp_path: Path) -> None:
    section = zero(2, tmp_path, optimizer="nvme")
    with started(config(bf16={"enabled": True}, tiermem={**TIGHT, "hbm": "4MiB"},
                        **{ZERO: section})) as engine:  # fmt: skip
        train(engine, 1, torch.bfloat16)
        found = homes(engine)
        assert found["master"] == found["optimizer"] == {"nvme"}


def test_without_offloading_a_model_that_does_not_fit_is_refused_and_said_how() -> None:
    model = build()
    with pytest.raises(tiermem.CapacityError, match=r"offload_param\.device: cpu .* would"):
        deepspeed.initialize(model=model, config=config(**{ZERO: {"stage": 3}}))
    loss_of(model, torch.randn(2, 32)).backward()  # an ordinary model still


@pytest.mark.parametrize("section", ["param", "optimizer"])
def test_nvme_needs_a_folder(section: str, tmp_path: Path) -> None:
    path = f"{ZERO}.offload_{section}"
    with pytest.raises(tiermem.ConfigError, match=rf"{path}.device='nvme': {path}.nvme_path is"):
        deepspeed.explain({ZERO: {f"offload_{section}": {"device": "nvme"}}})
    gone = str(tmp_path / "gone")
    raw = {ZERO: {f"offload_{section}": {"device": "nvme", "nvme_path": gone}}}
    assert "there is no such folder" in deepspeed.explain(raw).refused  # a file of another machine
    model = build()
    with pytest.raises(tiermem.ConfigError, match=rf"{path}.nvme_path='{gone}': there is no such"):
        deepspeed.initialize(model=model, config=raw)
    loss_of(model, torch.randn(2, 32)).backward()


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(
        tiermem.ConfigError, match=r"offload_param.device='disk': it must be one of 'none', 'cpu'"
    ):
        deepspeed.explain({ZERO: {"offload_param": {"device": "disk"}}})


def test_two_folders_are_striped_over(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir(), other.mkdir()
    section = {
        "offload_param": {"device": "nvme", "nvme_path": str(one)},
        "offload_optimizer": {"device": "nvme", "nvme_path": str(other)},
    }
    assert deepspeed.explain({ZERO: section}).manager["nvme"] == [str(one), str(other)]


def test_sizes_in_elements_become_bytes_of_host_memory(tmp_path: Path) -> None:
    """DRAM is what is at home there, and the buffers that the file asks for."""
    model = nn.Linear(1000, 1000, bias=False)  # a million elements
    section: dict[str, Any] = {
        "stage": 3,
        "sub_group_size": 100_000,
        "offload_param": {"device": "nvme", "nvme_path": str(tmp_path), "buffer_count": 3,
                          "buffer_size": 50_000, "max_in_cpu": 200_000},
        "offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path), "buffer_count": 5},
    }  # fmt: skip

    def dram(bf16: bool) -> int:
        own = {"device": "cpu", "hbm": "32MiB"}
        raw = {ZERO: section, "bf16": {"enabled": bf16}, "tiermem": own}
        return int(deepspeed.explain(raw, model=model).manager["dram"])

    def sized(grads: int, ahead: int) -> int:
        pages, chunks = -(-grads // 4096) * 4096, 16 * (32 << 10)  # of gradients; for files
        total = pages + chunks + ahead
        return total + total // 32 + (256 << 20)

    def expected(weight: int) -> int:
        ahead = (3 * 50_000 + 200_000) * weight
        return sized(1_000_000 * weight, ahead + 5 * 100_000 * 4)

    assert dram(False) == expected(4)
    assert dram(True) == expected(2)
    section["offload_param"]["max_in_cpu"] = 1e12  # no more than there is
    section["offload_optimizer"]["buffer_count"] = 10**9
    assert dram(False) == sized(4_000_000, 4_000_000 + 12_000_000)
    rows = deepspeed.explain({ZERO: section, "bf16": {"enabled": True}}, model=model)
    assert rows[f"{PARAM}.buffer_size"].setting == "TierManager(dram): 100,000 bytes"
    assert rows[f"{ZERO}.sub_group_size"].setting == "TierManager(dram): 400,000 bytes"


def test_buffers_without_files_have_no_effect() -> None:
    rows = deepspeed.explain({ZERO: {"offload_param": {"device": "cpu", "buffer_size": 5}}})
    assert f"{PARAM}.buffer_size" in rows.without_effect
    assert rows[f"{PARAM}.buffer_size"].effect == f"{PARAM}.device is not 'nvme'"


def test_no_prefetching_where_its_bucket_is_empty() -> None:
    for written, depth in ((0, 0), (5e7, None)):
        section = {"stage": 3, "stage3_prefetch_bucket_size": written}
        rows = deepspeed.explain({ZERO: section})
        assert rows.manager.get("prefetch_depth") == depth
        no_effect = f"{ZERO}.stage3_prefetch_bucket_size" in rows.without_effect
        assert no_effect == (depth is None)
    section = {**zero(3, param="cpu", optimizer="cpu"), "stage3_prefetch_bucket_size": 0}
    with started(config(**{ZERO: section})) as engine:
        assert train(engine, 3) == plain(3)
        assert engine.tier.stats().prefetches == 0


@pytest.mark.parametrize(
    ("ratio", "where", "share"),
    [(None, "auto", None), (1.0, "host", None), (0.0, "device", None), (2 / 3, "both", 2 / 3)],
)
def test_the_ratio_is_the_share_that_the_host_steps(
    ratio: float | None, where: str, share: float | None
) -> None:
    section = zero(3, param="cpu", optimizer="cpu")
    if ratio is not None:
        section["offload_optimizer"]["ratio"] = ratio
    with started(config(**{ZERO: section})) as engine:
        assert engine.plan.optimizer["where"] == where
        assert engine.plan.optimizer.get("host_share") == share
        losses = train(engine, 3)
        units = engine.optimizer._units
        count = sum(p.numel() for unit in units for p, _ in unit.members)
        host = sum(p.numel() for unit in units if unit.host is not None for p, _ in unit.members)
        assert host == {"auto": 0, "device": 0, "host": count, "both": count * 2 // 3}[where]
        assert losses == pytest.approx(plain(3), rel=1e-5)
        if where in ("auto", "device"):
            assert losses == plain(3)


def test_a_ratio_needs_something_to_be_offloaded() -> None:
    with pytest.raises(tiermem.ConfigError, match=r"ratio=0.5: .*device is 'none'"):
        deepspeed.explain({ZERO: {"stage": 3, "offload_optimizer": {"ratio": 0.5}}})
    with pytest.raises(tiermem.ConfigError, match=r"ratio=1.5: it must be a number from 0 to 1"):
        deepspeed.explain({ZERO: {"offload_optimizer": {"device": "cpu", "ratio": 1.5}}})


class Recomputed(nn.Module):
    """Every layer is recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = build()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = deepspeed.checkpointing.checkpoint(layer, x)
        return x


@pytest.mark.parametrize("on", [True, False])
def test_cpu_checkpointing_moves_what_checkpoints_keep(on: bool) -> None:
    settings = config(activation_checkpointing={"cpu_checkpointing": on},
                      tiermem={**TIGHT, "activation_min": 128})  # fmt: skip
    with started(settings, Recomputed()) as engine:
        assert train(engine, 3) == plain(3)
        assert (engine.tier.stats().activations.offloaded_bytes > 0) == on
        assert engine.plan.manager["policy"]["activations"] == ("dram" if on else "auto")


def test_checkpoints_of_deepspeed_are_those_of_torch() -> None:
    layer, x = build()[0], torch.randn(2, 32)
    torch.manual_seed(1)
    theirs = checkpoint(layer, x, use_reentrant=False)
    mine = deepspeed.checkpointing.checkpoint(layer, x)
    assert torch.equal(mine, theirs)
    deepspeed.checkpointing.configure(None, partition_activations=True)
    assert deepspeed.checkpointing.is_configured()
    with pytest.warns(UserWarning, match="cpu_checkpointing: true"):
        deepspeed.checkpointing.configure(None, checkpoint_in_cpu=True)


def test_budgets_are_the_files_or_the_calls() -> None:
    with started(config()) as engine:
        assert engine.tier.stats().budget["hbm"] == 96 << 10
        assert engine.tier.stats().budget["dram"] == 8 << 20
    with started(config(), tiermem={"hbm": "128KiB", "overlap": False}) as engine:
        assert engine.tier.stats().budget["hbm"] == 128 << 10
        assert engine.plan.optimizer["overlap"] is False
        assert train(engine, 3) == plain(3)


def test_unknown_settings_of_the_call_are_refused() -> None:
    with pytest.raises(tiermem.ConfigError, match=r"'hmb'.*it has .*hbm"):
        deepspeed.initialize(model=build(), config=config(), tiermem={"hmb": "1GiB"})


def test_steps_inside_backward_need_a_loop_that_looks_at_no_gradient() -> None:
    room = {**TIGHT, "overlap": "backward"}
    with pytest.raises(tiermem.ConfigError, match="gradient_clipping: 0"):
        deepspeed.explain(config(tiermem=room))
    with started(config(tiermem=room, gradient_clipping=0.0)) as engine:
        assert train(engine, 6) == plain(6, clip=0)
        assert engine.optimizer.stepped_in_backward > 0


def test_what_has_no_effect_is_listed_by_name() -> None:
    section = {"stage": 3, "overlap_comm": True, "stage3_max_live_parameters": 1e9,
               "offload_param": {"device": "cpu", "pin_memory": True}}  # fmt: skip
    found = deepspeed.explain(
        {
            ZERO: section,
            "aio": {"block_size": 1 << 20, "thread_count": 2},
            "prescale_gradients": True,
            "tensorboard": {"enabled": True},
        }
    )
    assert set(found.without_effect) == {
        f"{ZERO}.overlap_comm", f"{ZERO}.stage3_max_live_parameters", f"{PARAM}.pin_memory",
        "aio.block_size", "aio.thread_count", "prescale_gradients", "tensorboard",
    }  # fmt: skip
    text = str(found)
    assert "aio.thread_count = 2: no effect: tiermem uses io_uring for files" in text
    assert f"{PARAM}.device = 'cpu': Policy(params='dram')" in text


def test_the_rest_of_tiermems_own_section_goes_to_the_manager() -> None:
    own = {"device": "cpu", "nvme_bytes": "1GiB", "prefetch_depth": 3, "activation_min": "64KiB",
           "activation_layers": 2}  # fmt: skip
    manager = deepspeed.explain({"tiermem": own}).manager
    assert {key: manager[key] for key in own} == own
