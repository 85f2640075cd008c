"""The run of "Extreme offloading": LoRA under a cap, layers that stream."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support_integrations import batches, decoder, resident_losses, twin
from torch import nn

import tiermem

peft = pytest.importorskip("peft")

from tiermem.integrations.extreme_offloading import Offloading  # noqa: E402
from tiermem.integrations.extreme_offloading import offloading as module  # noqa: E402

LAYERS = 6
WIDTH = 192
STEPS = 3


def model_bytes() -> int:
    return sum(p.numel() * 4 for p in decoder(LAYERS, width=WIDTH).parameters())


CAP = 2 * model_bytes() // 3


def offloading(model: nn.Module | None = None, **options: Any) -> Offloading:
    options = {"cap": CAP, "activations": 4096, "device": "cpu", "dram": "16MiB", **options}
    return Offloading(decoder(LAYERS, width=WIDTH) if model is None else model, **options)


def train(run: Offloading, **settings: Any) -> tuple[list[float], tiermem.Stats]:
    optimizer = run.optimizer(**settings)
    losses = []
    for tokens in batches(STEPS):
        run.tier.reset_stats()
        loss = run.model(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, run.tier.stats()


def resident(rank: int = 8, alpha: int = 16, seed: int = 42) -> nn.Module:
    """The same model with peft's adapters, nothing else."""
    model = decoder(LAYERS, width=WIDTH)
    targets = [f"layers.{n}.{part}" for n in range(LAYERS) for part in ("up", "down")]
    model.requires_grad_(False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        peft.inject_adapter_in_model(
            peft.LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets), model
        )
    return model


def test_losses_are_the_resident_ones() -> None:
    model = resident()
    trained = [p for p in model.parameters() if p.requires_grad]
    expected = resident_losses(model, torch.optim.Adam(trained, lr=1e-2), STEPS, max_norm=None)
    with offloading(learning_rate=1e-2) as run:
        losses, stats = train(run)
        assert losses == expected
        assert stats.links["dram->hbm"].nbytes > 0
        assert "hbm->dram" not in stats.links  # what is frozen is never written


def test_the_cap_holds() -> None:
    with offloading() as run:
        _, stats = train(run)
        assert stats.peak["hbm"] <= stats.budget["hbm"] == CAP - 4096
        homes = {(row.role, row.home) for row in run.tier.residency()}
        assert ("param", "dram") in homes
        assert {home for role, home in homes if role in ("grad", "optimizer")} == {"hbm"}
        for row in run.tier.residency():
            if row.role == "param":
                inside = ".layers." in row.block and "lora" not in row.block
                assert row.home == ("dram" if inside else "hbm"), row.block
    with offloading(cap="4MiB", activations=None) as run:
        assert run.tier.stats().budget["hbm"] == 3 << 20


def test_adapters() -> None:
    with offloading(rank=4, alpha=8, seed=7) as run:
        found = {n: p.detach() for n, p in run.model.named_parameters() if p.requires_grad}
        expected = {n: p for n, p in resident(4, 8, 7).named_parameters() if p.requires_grad}
        assert found.keys() == expected.keys()
        for name, param in expected.items():
            assert torch.equal(found[name], param) and found[name].dtype == torch.float32
        frozen = [p for p in run.model.parameters() if not p.requires_grad]
        assert len(frozen) == len(list(decoder(LAYERS, width=WIDTH).parameters()))


def test_the_programs_random_numbers_go_on() -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    model = twin(decoder(LAYERS, width=WIDTH))
    with offloading(model):
        assert torch.equal(torch.rand(4), expected)


def test_dtype() -> None:
    with offloading(dtype="bf16") as run:
        dtypes = {p.requires_grad: p.dtype for p in run.model.parameters()}
        assert dtypes == {False: torch.bfloat16, True: torch.float32}


def test_prefetch(monkeypatch: pytest.MonkeyPatch) -> None:
    depths = []

    class Recorded(tiermem.TierManager):
        def __init__(self, *args: Any, **settings: Any) -> None:
            depths.append(settings["prefetch_depth"])
            super().__init__(*args, **settings)

    monkeypatch.setattr(module, "TierManager", Recorded)
    with offloading(prefetch=False) as run:
        assert train(run)[1].prefetches == 0
    with offloading():
        assert depths == [0, "auto"]


def test_pin_is_without_effect() -> None:
    with offloading(pin=False) as run, offloading(pin=True) as other:
        assert train(run)[0] == train(other)[0]


@pytest.mark.parametrize(
    "options, says",
    [
        ({"rnk": 8}, "no options"),
        ({"rank": "eight"}, "rank must be a whole number"),
        ({"cap": "many"}, "cap is not a size"),
        ({"cap": 4096, "activations": 4096}, "leave nothing of cap"),
        ({"rank": 0}, "rank must be at least 1, not 0"),
        ({"alpha": -1}, "alpha must be at least 1"),
        ({"learning_rate": -1e-3}, "learning_rate must be at least 0"),
        ({"dtype": torch.int8}, "dtype must be one of"),
        ({"device": "tpu"}, "tpu"),
        ({"dram": "much"}, "dram is not a size"),
        ({"dram": 10}, "does not fit in tier dram"),
        ({"cap": "8KiB", "dtype": "bf16"}, "cap= leaves 4096 for them"),
        ({"seed": 2**70}, "seed must be between"),
    ],
)
def test_bad_input_changes_nothing(options: dict[str, Any], says: str) -> None:
    model = decoder(LAYERS, width=WIDTH)
    with pytest.raises(tiermem.TierError, match=says):
        offloading(model, **options)
    assert not any("lora" in name for name, _ in model.named_parameters())
    assert all(p.requires_grad for p in model.parameters())
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert not any(type(m).__name__ != k for m, k in zip(model.modules(), KINDS, strict=True))


KINDS = [type(module).__name__ for module in decoder(LAYERS, width=WIDTH).modules()]


def test_a_model_that_is_wrapped_already_gets_no_adapters() -> None:
    model = decoder(LAYERS, width=WIDTH)
    with tiermem.TierManager("cpu", hbm="1MiB", dram="8MiB") as tier:
        tier.wrap(model)
        with pytest.raises(tiermem.WrapError, match="wrapped already"):
            offloading(model)
        assert not any("lora" in name for name, _ in model.named_parameters())


def test_a_model_without_layers_is_refused() -> None:
    with pytest.raises(tiermem.ConfigError, match="no list of layers"):
        offloading(nn.Linear(4, 4))
