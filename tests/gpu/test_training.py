"""On a CUDA device: the same bits as resident, over every combination of home tiers."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import tiermem

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, width: int, layers: int, mode: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 256)
        self.mode = mode

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        for layer in self.layers:
            if self.mode == "plain":
                h = layer(h)
            else:
                h = checkpoint(layer, h, use_reentrant=self.mode == "reentrant")
        return self.head(self.norm(h.flatten(0, 1)))


def build(mode: str, layers: int = 8, width: int = 512) -> Model:
    torch.manual_seed(0)
    return Model(width, layers, mode).cuda()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, clip) -> list[float]:
    losses = []
    for step in range(steps):
        torch.manual_seed(step)
        optimizer.zero_grad()
        for _ in range(2):
            x = torch.randint(0, 256, (4, 64), device="cuda")
            loss = F.cross_entropy(model(x), x.flatten())
            loss.backward()
        norm = clip(1.0)
        optimizer.step()
        losses += [loss.item(), norm.item()]
    return losses


@pytest.mark.parametrize("mode", ["plain", "nonreentrant", "reentrant"])
@pytest.mark.parametrize("home", ["dram", "nvme", "mixed"])
def test_training_equals_resident(mode: str, home: str, tmp_path: Path) -> None:
    plain = build(mode)
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    expected = train(plain, reference, 4, lambda m: nn.utils.clip_grad_norm_(plain.parameters(), m))
    model = build(mode)
    policy = {
        "dram": tiermem.Policy("dram", "dram", "dram", "dram"),
        "nvme": tiermem.Policy("nvme", "nvme", "nvme", "nvme"),
        "mixed": tiermem.Policy("dram", "dram", "dram", "nvme"),
    }[home]
    with tiermem.TierManager(
        "cuda", hbm="40MiB", dram="512MiB", nvme=tmp_path, policy=policy
    ) as tier:
        tier.wrap(model)
        optimizer = tier.optimizer(model, torch.optim.AdamW, lr=1e-3)
        assert train(model, optimizer, 4, optimizer.clip_grad_norm_) == expected
        state = model.state_dict()
        for name, value in plain.state_dict().items():
            assert torch.equal(value.cpu(), state[name].cpu()), name
        mine, theirs = optimizer.state_dict()["state"], reference.state_dict()["state"]
        for key, values in theirs.items():
            for name, value in values.items():
                assert torch.equal(value.cpu(), mine[key][name].cpu()), (key, name)
        tier._manager.parts.table.check()


def _delay(engine, way: str, cycles: int) -> None:
    """Makes every copy of one way late."""
    inner, stream = getattr(engine, f"copy_{way}"), getattr(engine, f"{way}_stream")

    def late(target, source):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(cycles)
        return inner(target, source)

    setattr(engine, f"copy_{way}", late)


def train_scaled(model: nn.Module, optimizer: torch.optim.Optimizer, clip: bool) -> list[float]:
    """Trains in half precision; returns losses, norms and scales. One loss is infinite."""
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**12, growth_interval=3)
    found = []
    for step in range(9):
        torch.manual_seed(step)
        x = torch.randint(0, 256, (4, 64), device="cuda")
        with torch.autocast("cuda", torch.float16):
            loss = F.cross_entropy(model(x), x.flatten())
        scaler.scale(loss * (float("inf") if step == 5 else 1.0)).backward()
        if clip:
            scaler.unscale_(optimizer)
            found.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        found += [loss.item(), scaler.get_scale()]
    return found


@pytest.mark.parametrize("where", ["auto", "device"])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("clip", [True, False])
def test_training_with_a_scaler_equals_resident(where: str, fused: bool, clip: bool) -> None:
    plain, model = build("plain"), build("plain")
    settings = {"lr": 1e-3, "fused": fused}
    expected = train_scaled(plain, torch.optim.AdamW(plain.parameters(), **settings), clip)
    with tiermem.TierManager("cuda", hbm="40MiB", dram="512MiB") as tier:
        tier.wrap(model)
        optimizer = tier.optimizer(model, torch.optim.AdamW, where=where, **settings)
        found = train_scaled(model, optimizer, clip)
        assert [str(value) for value in found] == [str(value) for value in expected]  # NaN too
        for name, value in plain.state_dict().items():
            assert torch.equal(value.cpu(), model.state_dict()[name].cpu()), name


@pytest.mark.parametrize("stream", ["up", "down", "both", "compute"])
@pytest.mark.parametrize("depth", [0, 1, 4, "auto"])
def test_late_streams_change_nothing(stream: str, depth, tmp_path: Path) -> None:
    plain = build("plain", layers=6)
    reference = torch.optim.SGD(plain.parameters(), lr=1e-2, momentum=0.9)
    expected = train(plain, reference, 3, lambda m: torch.zeros(()))
    model = build("plain", layers=6)
    if stream == "compute":
        for layer in model.layers:
            layer.register_forward_pre_hook(lambda *_: torch.cuda._sleep(2_000_000))
    with tiermem.TierManager("cuda", hbm="36MiB", dram="512MiB", prefetch_depth=depth) as tier:
        tier.wrap(model)
        for way in ("up", "down"):
            if stream in (way, "both"):
                _delay(tier._manager.parts.copy, way, 3_000_000)
        optimizer = tier.optimizer(model, torch.optim.SGD, lr=1e-2, momentum=0.9)
        assert train(model, optimizer, 3, lambda m: torch.zeros(())) == expected
        assert tier.stats().evictions > 0


def _synchronizing(mode: str) -> None:
    """Sets what torch does where the host synchronizes; it warns that this is a prototype."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode(mode)


def test_steady_state_does_not_synchronize_nor_allocate(tmp_path: Path) -> None:
    model = build("plain").eval()
    x = torch.randint(0, 256, (4, 64), device="cuda")
    with tiermem.TierManager("cuda", hbm="36MiB", dram="256MiB") as tier, torch.no_grad():
        tier.wrap(model)
        for _ in range(3):
            model(x)
        torch.cuda.synchronize()
        segments = torch.cuda.memory_stats()["segment.all.allocated"]
        _synchronizing("error")
        try:
            for _ in range(3):
                model(x)
        finally:
            _synchronizing("default")
        assert torch.cuda.memory_stats()["segment.all.allocated"] == segments
        assert tier.stats().evictions > 0


def test_two_managers_on_one_device() -> None:
    x = torch.randint(0, 256, (4, 64), device="cuda")
    first, second = build("plain").eval(), build("plain").eval()
    expected = build("plain").eval()(x)
    with (
        tiermem.TierManager("cuda", hbm="36MiB", dram="128MiB") as a,
        tiermem.TierManager("cuda", hbm="48MiB", dram="128MiB") as b,
        torch.no_grad(),
    ):
        a.wrap(first)
        b.wrap(second)
        for _ in range(3):
            assert torch.equal(first(x), expected)
            assert torch.equal(second(x), expected)


def test_out_of_memory_leaves_the_manager_usable() -> None:
    model = build("plain").eval()
    x = torch.randint(0, 256, (4, 64), device="cuda")
    expected = model(x)
    with tiermem.TierManager("cuda", hbm="36MiB", dram="128MiB") as tier, torch.no_grad():
        tier.wrap(model)
        handle = model.layers[3].register_forward_pre_hook(
            lambda *_: torch.empty(1 << 46, dtype=torch.uint8, device="cuda")
        )
        with pytest.raises(torch.OutOfMemoryError):
            model(x)
        handle.remove()
        assert torch.equal(model(x), expected)


class Slow(torch.autograd.Function):
    """What comes before it in a forward waits in backward."""

    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> torch.Tensor:
        torch.cuda._sleep(20_000_000)
        return gradient.clone()


class OnStreams(nn.Module):
    """Two linear maps of one block, each on a stream of its own; one is slow in backward."""

    def __init__(self, slow: int, streams: list[torch.cuda.Stream]) -> None:
        super().__init__()
        self.maps = nn.ModuleList(nn.Linear(256, 256) for _ in streams)
        self.slow, self.streams = slow, streams

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs = []
        here = torch.cuda.current_stream()
        for number, (part, stream) in enumerate(zip(self.maps, self.streams, strict=True)):
            stream.wait_stream(here)
            with torch.cuda.stream(stream):
                y = part(x)
                outputs.append(Slow.apply(y) if number == self.slow else y)
            here.wait_stream(stream)
        return sum(outputs, x)


@pytest.mark.parametrize("slow", [0, 1])
def test_gradients_of_one_block_from_two_streams(slow: int) -> None:
    streams = [torch.cuda.Stream() for _ in range(2)]

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*[OnStreams(slow, streams) for _ in range(3)]).cuda()

    def steps(model: nn.Module) -> list[torch.Tensor]:
        found = []
        for number in range(4):
            torch.manual_seed(number)
            model(torch.randn(32, 256, device="cuda")).square().mean().backward()
            found += [p.grad.clone() for p in model.parameters()]
            model.zero_grad()
        torch.cuda.synchronize()
        return found

    expected = steps(make())
    with tiermem.TierManager(hbm="16MiB", dram="64MiB") as tier:  # all of a block in one unit
        model = make()
        tier.wrap(model, [str(i) for i in range(3)])
        mine = steps(model)
    for theirs, gradient in zip(expected, mine, strict=True):
        assert torch.equal(theirs, gradient)
