"""Small programs of users that read and write weights in their own ways: the same bits, or told."""

from __future__ import annotations

import copy
import ctypes
import io
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support_nn import assert_same, same_bits, seed
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.func import functional_call, grad, hessian, jacrev, linearize, stack_module_state, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import linear
from torch.nn.utils import parametrizations, parametrize, prune
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import tiermem

pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr"),  # torch.func.linearize
]
WIDTH = 32
HOMES: dict[str, dict[str, Any]] = {
    "little": {"hbm": "40KiB", "policy": "dram"},
    "weights in HBM": {"hbm": "64KiB", "policy": {"params": "hbm"}},
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)
        )
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(x))
        for layer in self.layers:
            x = x + layer(x)
        return self.last(x)


def build() -> Net:
    seed(6)
    return Net()


def data() -> torch.Tensor:
    seed(7)
    return torch.randn(6, WIDTH)


class Keep(torch.autograd.Function):
    """Saves a weight itself, as an attribute or as torch has it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, attribute: bool) -> torch.Tensor:
        ctx.save_for_backward(x, *([] if attribute else [weight]))
        ctx.weight = weight if attribute else None
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, *saved = ctx.saved_tensors
        weight = saved[0] if saved else ctx.weight
        return gradient @ weight.t(), x.t() @ gradient, None


Program = Callable[[Any, torch.Tensor], Any]
PROGRAMS: dict[str, Program] = {}


def program(function: Program) -> Program:
    PROGRAMS[function.__name__] = function
    return function


def gradients(m: nn.Module) -> list[torch.Tensor]:
    return [p.grad.detach().clone() for p in m.parameters() if p.grad is not None]


def trained(m: nn.Module, optimizer: Any, x: torch.Tensor) -> Any:
    for step in range(2):
        optimizer.zero_grad()
        m(x + step).square().mean().backward()
        optimizer.step()
    return m.state_dict()


def saved(value: Any) -> Any:
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=False)


def at_address(tensor: torch.Tensor) -> bytes:
    return ctypes.string_at(tensor.data_ptr(), tensor.numel() * tensor.itemsize)


PROGRAMS.update(
    {
        "numpy": lambda m, x: [p.detach().numpy().copy().tolist() for p in m.parameters()],
        "an array": lambda m, x: m.first.weight.requires_grad_(False).__array__().tolist(),
        "dlpack": lambda m, x: [torch.from_dlpack(p.detach()).clone() for p in m.parameters()],
        "an address": lambda m, x: at_address(m.first.weight),
        "a storage": lambda m, x: bytes(m.first.weight.detach().clone().untyped_storage()),
        "saved": lambda m, x: saved(m.first.weight),
        "values saved": lambda m, x: saved([m.first.weight.data, m.last.weight.detach()]),
        "pickled": lambda m, x: pickle.loads(pickle.dumps(m.first.weight)),
        "values pickled": lambda m, x: pickle.loads(pickle.dumps(m.first.weight.detach())),
        "deepcopy": lambda m, x: [copy.deepcopy(p) for p in m.parameters()],
        "deepcopy of all": lambda m, x: copy.deepcopy(m)(x),
        "traced": lambda m, x: torch.jit.trace(m.layers[0], (x,))(x),
        "traced by fx": lambda m, x: torch.fx.symbolic_trace(m)(x),
        "make_fx": lambda m, x: make_fx(lambda a: linear(a, m.first.weight))(x)(x),
        "linearize": lambda m, x: linearize(lambda a: (a @ m.first.weight).tanh(), x)[1](x),
        "functional_call": lambda m, x: functional_call(
            m, {name: p * 2 for name, p in m.named_parameters()}, (x,)
        ),
        "its own tensors": lambda m, x: functional_call(m, dict(m.named_parameters()), (x,)),
        "stacked": lambda m, x: [*stack_module_state(list(m.layers))[0].values()],
        "vmap": lambda m, x: vmap(lambda row: (row * x).sum())(m.first.weight),
        "jacrev": lambda m, x: jacrev(lambda b: (x @ m.first.weight + b).tanh())(m.first.bias),
        "hessian": lambda m, x: hessian(lambda a: m.eval()(a).sum())(x[:1]),
        "old hessian": lambda m, x: torch.autograd.functional.hessian(
            lambda b: (x @ m.first.weight + b).tanh().sum(), m.first.bias
        ),
        "old jvp": lambda m, x: torch.autograd.functional.jvp(m.eval(), x, torch.ones_like(x)),
        "a vector": lambda m, x: nn.utils.parameters_to_vector(m.parameters()),
        "update_bn": lambda m, x: [update_bn([x, x * 2], m), m.state_dict()],
        "weight_norm": lambda m, x: parametrizations.weight_norm(m.first)(x),
        "spectral_norm": lambda m, x: parametrizations.spectral_norm(m.first)(x),
        "parametrized": lambda m, x: parametrize.register_parametrization(
            m.first, "weight", nn.Tanh()
        )(x),
        "pruned": lambda m, x: prune.l1_unstructured(m.first, "weight", amount=0.3)(x),
        "share_memory": lambda m, x: m.share_memory()(x),
        "one shared": lambda m, x: m.first.weight.share_memory_(),
        "float": lambda m, x: m.float()(x),
        "double": lambda m, x: m.double()(x.double()),
        "addresses": lambda m, x: len({p.data_ptr() for p in m.parameters()}),
        "autograd.grad": lambda m, x: torch.autograd.grad(m(x).sum(), list(m.parameters())),
        "SGD": lambda m, x: trained(m, torch.optim.SGD(m.parameters(), 0.01, momentum=0.9), x),
        "foreach": lambda m, x: trained(m, torch.optim.AdamW(m.parameters(), foreach=True), x),
        "fused": lambda m, x: trained(m, torch.optim.AdamW(m.parameters(), fused=True), x),
        "resize_": lambda m, x: [m.requires_grad_(False).first.weight.resize_(2, 2), m(x[:2, :2])],
        "t_": lambda m, x: [m.requires_grad_(False).first.weight.t_().stride(), m(x)],
        "unsqueeze_": lambda m, x: [m.requires_grad_(False).first.bias.unsqueeze_(0).shape, m(x)],
        "data.t()": lambda m, x: [setattr(m.first.weight, "data", m.first.weight.data.t()), m(x)],
    }
)  # fmt: skip


@program
def per_sample_gradients(m: Any, x: torch.Tensor) -> Any:
    params = {name: p.detach() for name, p in m.eval().named_parameters()}

    def loss(values: Any, one: torch.Tensor) -> torch.Tensor:
        return functional_call(m, values, (one.unsqueeze(0),)).square().sum()

    return [*vmap(grad(loss), (None, 0))(params, x).values()]


@program
def forward_mode(m: Any, x: torch.Tensor) -> Any:
    with forward_ad.dual_level():
        weight = forward_ad.make_dual(m.first.weight, torch.ones(WIDTH, WIDTH))
        return [*forward_ad.unpack_dual((x @ weight).tanh())]


@program
def clipped_values(m: Any, x: torch.Tensor) -> Any:
    m(x).square().sum().backward()
    nn.utils.clip_grad_value_(m.parameters(), 0.01)
    return gradients(m)


@program
def averages(m: Any, x: torch.Tensor) -> Any:
    found = []
    for options in ({}, {"multi_avg_fn": get_ema_multi_avg_fn(0.9)}):
        average = AveragedModel(m, **options)
        with torch.no_grad():
            for p in average.parameters():
                p.add_(0.1)
        average.update_parameters(m)
        average.update_parameters(m)
        found.append(average(x))
    return found


@program
def average_by_hand(m: Any, x: torch.Tensor) -> Any:
    shadow = [p.detach().clone() for p in m.parameters()]
    with torch.no_grad():
        for p in m.parameters():
            p.mul_(1.5)
        torch._foreach_lerp_(shadow, list(m.parameters()), 0.1)
        kept = [p.detach().cpu().clone() for p in m.parameters()]
        for p, s in zip(m.parameters(), shadow, strict=True):
            p.data.copy_(s)
        result = m(x)
        for p, k in zip(m.parameters(), kept, strict=True):
            p.data.copy_(k)
    return [result, m(x), shadow]


@program
def initialized(m: Any, x: torch.Tensor) -> Any:
    seed(8)
    m.apply(lambda module: nn.init.zeros_(module.bias) if hasattr(module, "bias") else None)
    nn.init.orthogonal_(m.first.weight)
    nn.init.trunc_normal_(m.last.weight)
    nn.init.kaiming_normal_(m.layers[0][0].weight)
    m.layers[1][0].reset_parameters()
    return m.state_dict()


@program
def hooks(m: Any, x: torch.Tensor) -> Any:
    found: list[float] = []
    for p in m.parameters():
        p.register_hook(lambda g: g * 2)
        p.register_post_accumulate_grad_hook(lambda q: found.extend((q.grad.sum(), q.sum())))
    m(x).square().sum().backward()
    return [found, gradients(m)]


@program
def steps_in_hooks(m: Any, x: torch.Tensor) -> Any:
    def step(p: torch.Tensor) -> None:
        with torch.no_grad():
            p.add_(p.grad, alpha=-0.1)
        p.grad = None

    for p in m.parameters():
        p.register_post_accumulate_grad_hook(step)
    for _ in range(2):
        m(x).square().sum().backward()
    return m.state_dict()


@program
def twice_differentiated(m: Any, x: torch.Tensor) -> Any:
    params = list(m.eval().parameters())
    first = torch.autograd.grad(m(x).square().sum(), params, create_graph=True)
    sum((g * g).sum() for g in first).backward()  # type: ignore[union-attr]
    return gradients(m)


@program
def gradient_penalty(m: Any, x: torch.Tensor) -> Any:
    x.requires_grad_()
    (first,) = torch.autograd.grad(m(x).sum(), x, create_graph=True)
    (first.norm(2, 1) - 1).square().mean().backward()
    return gradients(m)


@program
def twice_through_a_checkpoint(m: Any, x: torch.Tensor) -> Any:
    x.requires_grad_()
    result = checkpoint(m.eval(), x, use_reentrant=False)
    (first,) = torch.autograd.grad(result.square().sum(), x, create_graph=True)
    first.square().sum().backward()
    return gradients(m)


@program
def inner_steps(m: Any, x: torch.Tensor) -> Any:
    params = dict(m.eval().named_parameters())
    loss = functional_call(m, params, (x,)).square().mean()
    first = torch.autograd.grad(loss, list(params.values()), create_graph=True)
    fast = {name: p - 0.1 * g for (name, p), g in zip(params.items(), first, strict=True)}
    functional_call(m, fast, (x,)).square().mean().backward()
    return gradients(m)


@program
def line_search(m: Any, x: torch.Tensor) -> Any:
    optimizer = torch.optim.LBFGS(m.eval().parameters(), lr=0.1, max_iter=3)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = m(x).square().mean()
        loss.backward()
        return loss

    return [optimizer.step(closure), m.state_dict()]  # type: ignore[arg-type]


@program
def own_functions(m: Any, x: torch.Tensor) -> Any:
    for attribute in (False, True):
        result = Keep.apply(Keep.apply(x, m.first.weight, attribute), m.last.weight, attribute)
        m(x)
        result.sum().backward()
    return gradients(m)


@program
def own_hooks(m: Any, x: torch.Tensor) -> Any:
    with saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        one = m(x) + x @ m.last.weight
    with save_on_cpu():
        two = m(x) + x @ m.first.weight
    (one.sum() + two.sum()).backward()
    return gradients(m)


@program
def written_through_numpy(m: Any, x: torch.Tensor) -> Any:
    array = m.first.weight.detach().numpy()
    array[:] = 3.0
    del array
    with torch.no_grad():
        m.last.weight[0] = 1.0
        torch.mul(m.last.weight, 2, out=m.last.weight)
    return [m(x), m.state_dict()]


def after_backward(m: Any, x: torch.Tensor, write: Callable[[torch.Tensor], object]) -> Any:
    """What is in gradients once each was written, and in weights once they were used."""
    m(x).sum().backward()
    for p in m.parameters():
        write(p.grad)
    written = gradients(m)
    torch.optim.SGD(m.parameters(), lr=0.1).step()
    return [written, m.state_dict()]


@program
def gradients_through_dlpack(m: Any, x: torch.Tensor) -> Any:
    return after_backward(m, x, lambda g: torch.from_dlpack(g).mul_(2))


@program
def gradients_through_a_storage(m: Any, x: torch.Tensor) -> Any:
    def write(gradient: torch.Tensor) -> None:
        storage = gradient.untyped_storage()
        storage[0] = 1
        gradient.norm()
        storage[1] = 2

    return after_backward(m, x, write)


@program
def gradients_at_their_address(m: Any, x: torch.Tensor) -> Any:
    return after_backward(m, x, lambda g: ctypes.memset(g.data_ptr(), 0, g.itemsize))


def scaled(written: torch.Tensor, by: float) -> None:
    written.numpy()[...] *= by  # as a kernel of one's own, past torch


FUSED = torch.library.Library("tiermem_tests", "FRAGMENT")
FUSED.define("scaled(Tensor(a!) written, float by) -> ()")
FUSED.impl("scaled", scaled, "CPU")


@program
def gradients_by_an_operation_that_says_so(m: Any, x: torch.Tensor) -> Any:
    return after_backward(m, x, lambda g: torch.ops.tiermem_tests.scaled(g, 2.0))


@program
def weights_by_an_operation_that_says_so(m: Any, x: torch.Tensor) -> Any:
    with torch.no_grad():
        for p in m.parameters():
            torch.ops.tiermem_tests.scaled.default(p, 2.0)
    return [m(x), m.state_dict()]


@program
def counted(m: Any, x: torch.Tensor) -> Any:
    with FlopCounterMode(display=False) as counter:
        m(x).sum().backward()
    return [counter.get_total_flops(), gradients(m)]


@program
def fake(m: Any, x: torch.Tensor) -> Any:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        shape = m.eval()(mode.from_tensor(x)).shape
    return [shape, m(x), m(x)]


@program
def traced_then_trained(m: Any, x: torch.Tensor) -> Any:
    graph = make_fx(lambda a: linear(a, m.first.weight).tanh() @ m.last.weight)(x)
    with torch.no_grad():
        for p in m.parameters():
            p.add_(1)
    m(x)
    return graph(x)


MAY_BE_REFUSED = {
    "traced", "weight_norm", "spectral_norm", "parametrized", "pruned",
    "share_memory", "one shared", "double", "resize_", "t_", "unsqueeze_",
}  # fmt: skip
"""Whatever the budget; others only where HBM does not hold what is used at once."""


def plain_values(value: Any) -> Any:
    """Tensors detached, in whatever lists and dictionaries."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: plain_values(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain_values(inner) for inner in value]
    return value


@pytest.mark.filterwarnings("ignore:this .* steps weights in the tiers from outside")
@pytest.mark.parametrize("homes", HOMES)
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.one_in(3)
def test_the_same_bits_or_an_error_that_says_why(name: str, homes: str) -> None:
    run = PROGRAMS[name]
    found = refused = None
    with tiermem.TierManager("cpu", dram="4MiB", **HOMES[homes]) as tier:
        model = tier.wrap(build())
        try:
            found = plain_values(run(model, data()))
        except tiermem.TierError as error:
            wanted = tiermem.CapacityError, tiermem.ParameterError
            assert name in MAY_BE_REFUSED or (homes == "little" and isinstance(error, wanted))
            refused = str(error)
        if refused is not None:
            assert any(said in refused for said in ("block '", "parameter", "tier.wrap"))
            assert same_bits(build()(data()), model.train()(data()))  # and nothing is changed
            return
    assert_same(plain_values(run(build(), data())), found, name)


def test_a_tensors_own_address_may_be_asked_for_as_often_as_one_likes() -> None:
    with tiermem.TierManager("cpu", hbm="24KiB", dram="1MiB") as tier:
        model, plain = tier.wrap(build()), build()
        for _ in range(3):
            assert at_address(model.first.weight) == at_address(plain.first.weight)
            assert same_bits(model(data()), plain(data()))


def test_two_tensors_are_not_said_to_be_at_one_address() -> None:
    """Programs take what is at one address for one tensor, and leave the others out."""
    with tiermem.TierManager("cpu", hbm="24KiB", dram="1MiB") as tier:
        model = tier.wrap(build())
        with pytest.raises(tiermem.ParameterError, match=r"block '.*block '.*materialize"):
            {p.data_ptr(): p for p in model.parameters()}
        with tier.materialize(model):
            assert len({p.data_ptr() for p in model.parameters()}) == len(list(model.parameters()))


class ReadsElsewhere(nn.Module):
    """Gives a weight from a list to code that torch does not show, as a C++ extension would."""

    def __init__(self, weights: list[torch.Tensor]) -> None:
        super().__init__()
        self.own = nn.Linear(WIDTH, WIDTH)
        self.weights = weights

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return self.own(x) @ self.weights[0]


def test_a_weight_that_is_read_past_us_inside_a_call_is_named_with_the_call() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *[nn.Linear(WIDTH, WIDTH) for _ in range(3)])
    model.append(ReadsElsewhere([model[0].weight]))
    with tiermem.TierManager("cpu", hbm="16KiB", dram="1MiB") as tier:
        tier.wrap(model)
        with pytest.raises(tiermem.ParameterError, match=r"call of '4'.*block.*'.*4.*materialize"):
            model(data())
        with pytest.raises(RuntimeError, match="not in HBM"):  # for who knows nothing of tiermem
            model(data())


class Halves(nn.Linear):
    """May write its weight where torch does not count it."""

    halves = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.halves:
            self.weight.data.mul_(0.5)
        return super().forward(x)


@pytest.mark.parametrize("policy", ["dram", "nvme"])
@pytest.mark.parametrize("faked", [False, True])
def test_weights_are_looked_at_for_writes_beside_a_mode(
    tmp_path: Path, policy: str, faked: bool
) -> None:
    """The comparison with their bytes at home was traced, and read into a fake tensor."""
    seed(3)
    model = nn.Sequential(*[Halves(WIDTH, WIDTH) for _ in range(3)]).requires_grad_(False)
    x = torch.randn(2, WIDTH)
    expected = model(x)
    with (
        tiermem.TierManager("cpu", hbm="64KiB", dram="1MiB", nvme=tmp_path, policy=policy) as tier,
        torch.no_grad(),
    ):
        tier.wrap(model)
        if faked:
            with FakeTensorMode(allow_non_fake_inputs=True):
                assert model(x).shape == x.shape
        else:
            assert same_bits(make_fx(model)(x)(x), expected)
        assert not any(row.leases for row in tier.residency())
        assert same_bits(model(x), expected)


def test_blocks_that_come_ahead_are_no_part_of_a_trace() -> None:
    """Of one that sees operations before autograd does, as torch.export's, neither."""
    seed(3)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(6)]).requires_grad_(False)
    x = torch.randn(2, WIDTH)
    expected = model(x)
    with tiermem.TierManager("cpu", hbm="16KiB", dram="1MiB") as tier, torch.no_grad():
        tier.wrap(model.eval())
        graph = make_fx(model, pre_dispatch=True)(x)
        assert same_bits(graph(x), expected)
        assert same_bits(model(x), expected)


@pytest.mark.parametrize("way", ["gradient", "early"])
def test_traced_after_other_threads_have_called_it(way: str) -> None:
    """Weights that several threads use together are hidden from all; a mode takes no such class."""
    seed(5)
    model, x = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(3)]), torch.randn(2, WIDTH)

    def call(x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = model(x)
        return found

    def trace() -> torch.Tensor:
        if way == "early":
            graph = make_fx(call, pre_dispatch=True)(x)
        else:
            graph = make_fx(grad(lambda x: call(x).square().sum()))(x)
        found: torch.Tensor = graph(x)
        return found.detach()

    expected = trace()
    with tiermem.TierManager("cpu", hbm="1MiB", dram="1MiB") as tier:
        tier.wrap(model)
        together = threading.Barrier(3)

        def meet(*_: Any) -> None:
            together.wait()

        handles = [layer.register_forward_hook(meet) for layer in model]
        threads = [threading.Thread(target=model, args=(x,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for handle in handles:
            handle.remove()
        make_fx(model)(x)(x)  # looks at weights apart from calls
        assert same_bits(trace(), expected)
        assert not any(row.leases for row in tier.residency())
