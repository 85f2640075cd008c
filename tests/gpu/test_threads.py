"""Several threads evaluate one model whose layers do not all fit, on one stream or one each."""

from __future__ import annotations

import random
import sys
import threading
from copy import deepcopy

import pytest
import torch
from torch import nn

import tiermem

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]

WIDTH, LAYERS, CALLS = 256, 10, 80


class Layer(nn.Module):
    """Two matrices, between which the device may be late."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 2 * WIDTH),
            nn.Linear(2 * WIDTH, WIDTH),
        )
        self.late = random.Random(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(self.norm(x))
        if self.late.random() < 0.2:
            torch.cuda._sleep(200_000)
        return x + self.down(y.relu())


@pytest.mark.parametrize("layers", [2.2, 3.5, 6.0], ids="{} layers".format)
@pytest.mark.parametrize("streams", ["one stream", "a stream each"])
def test_threads_get_the_bits_of_the_resident_model(streams: str, layers: float) -> None:
    interval = sys.getswitchinterval()
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer() for _ in range(LAYERS))).cuda().requires_grad_(False)
    resident = deepcopy(model)
    xs = [torch.randn(rows, WIDTH, device="cuda") for rows in (1, 7, 64)]
    wanted = [resident(x) for x in xs]
    nbytes = sum(param.nbytes for param in model[0].parameters())
    wrong, failed = list[tuple[int, int]](), list[BaseException]()
    with tiermem.TierManager("cuda", hbm=int(layers * nbytes), dram="64MiB") as tier:
        tier.wrap(model)

        def run(number: int) -> None:
            draw = random.Random(number)
            stream = torch.cuda.Stream() if streams != "one stream" else torch.cuda.current_stream()
            stream.wait_stream(torch.cuda.default_stream())
            try:
                with torch.cuda.stream(stream), torch.no_grad():
                    for call in range(CALLS):
                        which = draw.randrange(len(xs))
                        if not torch.equal(model(xs[which]), wanted[which]):
                            wrong.append((number, call))
            except BaseException as error:
                failed.append(error)

        torch.cuda.synchronize()
        threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
        sys.setswitchinterval(1e-5)
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            sys.setswitchinterval(interval)
    for error in failed:
        raise error
    assert not wrong


@pytest.mark.filterwarnings("ignore:this .* steps weights in the tiers from outside")
@pytest.mark.parametrize("tiered", [True, False], ids=["tiered optimizer", "plain optimizer"])
@pytest.mark.parametrize("cls", [torch.optim.Adagrad, torch.optim.AdamW, torch.optim.SGD])
def test_hidden_weights_are_stepped_by_foreach(cls: type, tiered: bool) -> None:
    """As weights are that several threads use; single steps round otherwise."""
    torch.manual_seed(0)
    plain = nn.Sequential(*(Layer() for _ in range(3))).cuda()
    model = deepcopy(plain)
    nbytes = sum(param.nbytes for param in model.parameters())
    with tiermem.TierManager("cuda", hbm=2 * nbytes, dram="64MiB") as tier:
        tier.wrap(model)
        make = tier.optimizer if tiered else lambda params, cls, **given: cls(params, **given)
        optimizers = [cls(plain.parameters(), lr=0.01), make(model.parameters(), cls, lr=0.01)]
        for step in range(6):
            x = torch.randn(8, WIDTH, device="cuda")
            for one, optimizer in zip((plain, model), optimizers, strict=True):
                one(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                if step == 1:
                    thread = threading.Thread(target=one[0].norm.weight.sum)
                    thread.start()
                    thread.join()
                one[0].up.weight.sum()
            assert all(map(torch.equal, plain.parameters(), model.parameters())), step
