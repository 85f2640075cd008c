"""What other versions of torch do or do not do, played on whatever torch there is.

2.6 does not tell which saved-tensor hooks are on top, and forgets the hooks of parameters once
Python code has looked at what was saved of them under such hooks. From 2.15 on selective
checkpoints look for the user's hooks behind those of checkpoints.
"""

from __future__ import annotations

import inspect
import subprocess
import sys
from contextlib import ExitStack, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support_nn import Tiers
from support_optim import Net, Twins, watched
from torch import nn
from torch.overrides import has_torch_function
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import tiermem
from tiermem.nn.compat import counters
from tiermem.nn.compat.collectives import tell
from tiermem.nn.compat.hookpair import Pair, follow, top_pair
from tiermem.nn.passes.saved import WithBytes
from tiermem.nn.tensors import placeholder
from tiermem.nn.tensors.standin import StandIn, _exchange

autograd = torch._C._autograd
told = getattr(autograd, "_top_saved_tensors_default_hooks", None)


def of_the_user(pair: Pair | None) -> Pair | None:
    """Returns the pair that was pushed, where wrapped models have had one of ours put over it."""
    if pair is None:
        return None
    pack, unpack = pair
    return pack, unpack.unpack if isinstance(unpack, WithBytes) else unpack


@pytest.mark.skipif(told is None, reason="this torch does not tell which pair is on top")
@pytest.mark.parametrize("wrapped", [False, True])
@given(pushes=st.lists(st.booleans(), max_size=20))
def test_who_is_listened_to_tells_what_torch_tells(wrapped: bool, pushes: list[bool]) -> None:
    if wrapped:  # then every pair is covered as it is pushed
        with tiermem.TierManager("cpu", hbm="1MiB", dram="1MiB") as tier:
            tier.wrap(nn.Linear(4, 4))
            compare_tellers(pushes)
            return
    compare_tellers(pushes)


def compare_tellers(pushes: list[bool]) -> None:
    listened = SimpleNamespace(
        _push_saved_tensors_default_hooks=autograd._push_saved_tensors_default_hooks,
        _pop_saved_tensors_default_hooks=autograd._pop_saved_tensors_default_hooks,
    )
    top = follow(listened)
    depth = 0
    try:
        for number, push in enumerate(pushes):
            if push:
                pair: Any = (lambda t, n=number: (n, t), lambda p: p[1])
                listened._push_saved_tensors_default_hooks(*pair)
                depth += 1
            elif depth:
                listened._pop_saved_tensors_default_hooks()
                depth -= 1
            assert top_pair() == told(False)
            assert top() == of_the_user(top_pair())
    finally:
        for _ in range(depth):
            listened._pop_saved_tensors_default_hooks()
    assert top_pair() is None


_WITHOUT = """
import copy
import torch
autograd, name = torch._C._autograd, "_top_saved_tensors_default_hooks"
told = autograd.__dict__.pop(name, None)
import tiermem
if told is not None:  # later versions ask for it themselves
    setattr(autograd, name, told)
from torch import nn
from torch.utils.checkpoint import checkpoint

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
    def forward(self, x):
        for layer in self.layers[:2]:
            x = checkpoint(lambda y: torch.tanh(layer(y)), x, use_reentrant=False)
        with torch.autograd.graph.save_on_cpu():
            x = torch.tanh(self.layers[2](x))
        return self.layers[3](x)

torch.manual_seed(0)
plain = Net()
model = copy.deepcopy(plain)
with tiermem.TierManager("cpu", hbm="16KiB", dram="64KiB") as tier:
    tier.wrap(model)
    mine = tier.optimizer(model, torch.optim.AdamW)
    theirs = torch.optim.AdamW(plain.parameters())
    for step in range(3):
        for net, optimizer in ((plain, theirs), (model, mine)):
            torch.manual_seed(step)
            net(torch.randn(4, 16, requires_grad=True)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    expected, found = plain.state_dict(), model.state_dict()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert tier.stats().links["dram->hbm"].moves > 12
"""


def test_a_torch_that_does_not_tell_trains_the_same_bits() -> None:
    subprocess.run([sys.executable, "-W", "error", "-c", _WITHOUT], check=True)


def forget_hooks(model: nn.Module) -> None:
    """Removes the hooks that run before gradients of a model are accumulated."""
    for param in model.parameters():
        torch.Tensor._backward_hooks.__set__(param, None)  # type: ignore[attr-defined]


@pytest.mark.parametrize("overlap", [False, "forward", "backward"])
@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.one_in(2)
def test_gradients_that_are_not_announced(micro: int, overlap: Any) -> None:
    with watched(Twins(Net, Tiers("dram"), overlap=overlap)) as pair:
        if overlap == "backward":
            pair.optimizer.accumulate(micro)
        forget_hooks(pair.model)
        for step in range(4):
            for number in range(micro):
                pair.backward(micro * step + number, use_extra=number < 2)
            pair.step()
            pair.check()


def test_gradients_that_are_announced_after_all() -> None:
    with watched(Twins(Net, Tiers("dram"))) as pair:
        pair.backward(0)
        runtime = pair.model._call_impl.runtime
        entries = [entry for group in runtime.groups for entry in group.entries]
        for entry in entries:
            entry.unheard = True
            runtime.backward.incoming._unheard[id(entry.param)] = entry
        for number in range(1, 3):
            pair.backward(number)
        pair.step()
        pair.check()


def test_a_model_that_was_taken_out_is_forgotten() -> None:
    with watched(Twins(Net, Tiers("dram"))) as pair:
        forget_hooks(pair.model)
        pair.backward(0)
        unheard = pair.model._call_impl.runtime.backward.incoming._unheard
        assert unheard
        pair.step()
        pair.tier.unwrap(pair.model)
        other = pair.tier.wrap(nn.Linear(8, 8))
        other(torch.ones(1, 8)).sum().backward()
        assert not unheard


def test_one_that_is_not_accumulated_is_back_after_backward() -> None:
    with watched(Twins(Net, Tiers("dram"))) as pair:
        forget_hooks(pair.model)
        pair.backward(0)
        assert all(p.grad is not None for p in pair.model.parameters())
        before = [p.grad.clone() for p in pair.model.parameters()]
        out = pair.model.layers[0](torch.ones(2, 24, dtype=torch.bfloat16))
        out.sum().backward()  # of one layer only
        assert all(p.grad is not None for p in pair.model.parameters())
        mine = {id(p) for p in pair.model.layers[0].parameters()}
        for param, old in zip(pair.model.parameters(), before, strict=True):
            assert id(param) in mine or torch.equal(param.grad, old)


def users_pair() -> Any:
    """Returns the user's pair as selective checkpoints of torch 2.15 look for it."""
    pair = top_pair()
    while pair is not None and getattr(pair[0], "_checkpoint_internal", False):
        pair = pair[0]._user_hooks  # type: ignore[attr-defined]
    return pair


@pytest.mark.parametrize("users", [False, True])
@pytest.mark.parametrize("checkpoints", [False, True])
def test_selective_checkpoints_find_the_users_pair(users: bool, checkpoints: bool) -> None:
    """As if we were not there; where nothing lies between, ours hands on to it."""
    found: list[Any] = []

    class Looks(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found.append(users_pair())
            return super().forward(x)

    def pack(tensor: torch.Tensor) -> Any:
        seen.append(tensor)
        return tensor

    def pack_inside(tensor: torch.Tensor) -> Any:
        return tensor

    seen: list[torch.Tensor] = []
    pair = pack, lambda packed: packed
    pack_inside.__dict__.update(_checkpoint_internal=True, _user_hooks=pair if users else None)
    with tiermem.TierManager("cpu", hbm="16KiB", dram="64KiB") as tier, ExitStack() as stack:
        model = tier.wrap(nn.Sequential(Looks(8, 8)))
        hooks = torch.autograd.graph.saved_tensors_hooks
        if users:
            stack.enter_context(hooks(*pair))
        if checkpoints:
            stack.enter_context(hooks(pack_inside, lambda packed: packed))
        out = model(torch.ones(2, 8, requires_grad=True))
        del out
    (user,) = found
    assert (user is not None) is users
    if users:
        before = len(seen)
        user[1](user[0](torch.ones(3)))
        assert len(seen) == before + 1


def opts_in() -> bool:
    return "respect_saved_tensors_hooks" in inspect.signature(checkpoint).parameters


@pytest.mark.skipif(not opts_in(), reason="this torch's selective checkpoints know no hooks")
@pytest.mark.parametrize("users", [False, True])
def test_selective_checkpoints_that_respect_hooks(users: bool) -> None:
    class Selective(Net):
        def forward(self, ids: torch.Tensor, use_extra: bool = True) -> torch.Tensor:
            keep = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
            whole = super().forward
            return checkpoint(
                lambda ids: whole(ids, use_extra),
                ids,
                use_reentrant=False,
                context_fn=lambda: create_selective_checkpoint_contexts(keep),
                respect_saved_tensors_hooks=True,
            )

    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)
    with watched(Twins(Selective, Tiers("dram"))) as pair:
        for number in range(3):
            with hooks if users else nullcontext():
                pair.backward(number)
            pair.step()
            pair.check()


@pytest.mark.parametrize("several", [True, False])
def test_versions_are_counted_and_kept_by_any_torch(
    monkeypatch: pytest.MonkeyPatch, several: bool
) -> None:
    monkeypatch.setattr(counters, "_INCREMENTS", several and counters._INCREMENTS)
    monkeypatch.setattr(counters, "_KEEPS", several and counters._KEEPS)
    tensors = [torch.zeros(2) for _ in range(3)]
    tensors[1].add_(1)
    counters.increment_versions(tensors)
    assert [tensor._version for tensor in tensors] == [1, 2, 1]
    kept = counters.keep_versions(tensors[:2])
    for tensor in tensors:
        tensor.add_(1)
    for context in kept:
        context.__exit__(None, None, None)
    assert [tensor._version for tensor in tensors] == [1, 2, 2]
    counters.increment_versions([])
    assert not counters.keep_versions([])
    assert not counters._takes_several(lambda tensor: tensor._version)


def test_collectives_that_ask_no_class_are_told_of_stand_ins() -> None:
    """As those of torch up to 2.12: what they are given goes to C++, which asks nobody."""

    def broadcast(tensor: torch.Tensor, src: int) -> None:
        assert type(tensor) is torch.Tensor
        with torch.no_grad():
            tensor.add_(src)

    def gather(tensor: torch.Tensor, gather_list: list[torch.Tensor]) -> None:
        assert all(type(other) is torch.Tensor for other in (tensor, *gather_list))
        for other in gather_list:
            other.copy_(tensor)

    def isend(tensor: torch.Tensor) -> None:
        """Known by identity."""

    def barrier(group: object) -> None:
        """Takes no tensors."""

    def all_reduce(tensor: torch.Tensor) -> object:
        return has_torch_function((tensor,))

    def all_gather(tensor_list: list[torch.Tensor], tensor: torch.Tensor) -> None:
        """Asks one of its arguments, as those of torch from 2.13 on do."""
        assert not has_torch_function((tensor, *tensor_list))
        for other in tensor_list:
            other.detach().copy_(tensor)

    def scatter_object_list(output_list: list[object], input_list: list[object]) -> None:
        output_list[:] = input_list

    every = broadcast, gather, isend, barrier, all_reduce, all_gather, scatter_object_list
    functions: dict[str, Any] = {f.__name__: f for f in every}
    module = SimpleNamespace(__all__=[*functions, "gone"], **functions)
    package = SimpleNamespace(broadcast=broadcast, gather=None)
    told = tell(module, package, lambda value: isinstance(value, StandIn), _exchange)
    assert told == ["broadcast", "gather", "all_gather"] and package.gather is None
    assert package.broadcast is module.broadcast is not broadcast
    assert all(getattr(module, name) is functions[name] for name in functions if name not in told)

    with tiermem.TierManager("cpu", hbm="64KiB", dram="4MiB") as tier:
        model = tier.wrap(nn.Linear(8, 8))
        optimizer = tier.optimizer(model, torch.optim.AdamW, lr=0.1)
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        moment = optimizer.state[model.weight]["exp_avg"]
        wanted, weight = moment + 3, model.weight.detach() + 2
        assert isinstance(moment, StandIn) and isinstance(model.weight, StandIn)
        package.broadcast(moment, src=3)
        package.broadcast(model.weight, src=2)
        assert torch.equal(optimizer.state[model.weight]["exp_avg"], wanted)
        assert torch.equal(model.weight, weight)
        other = torch.zeros(8, 8)
        module.gather(other, [moment])
        assert not moment.any()
        module.gather(tensor=model.weight, gather_list=[other])
        assert torch.equal(other, weight)
        module.all_gather([moment, model.weight], other + 1)
        assert torch.equal(moment, weight + 1) and torch.equal(model.weight, weight + 1)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_collectives_that_are_told_of_stand_ins_are_compiled_into_one_graph() -> None:
    """The compiler has to get to torch's own where it was imported before tiermem."""

    def send(tensor: torch.Tensor) -> torch.Tensor:
        return tensor + 1

    module = SimpleNamespace(__all__=["send"], send=send)
    tell(module, module, lambda value: isinstance(value, StandIn), _exchange)
    with tiermem.TierManager("cpu", hbm="64KiB", dram="4MiB") as tier:
        tier.wrap(nn.Linear(8, 8))  # tiermem's own code is hidden from the compiler from now on
        compiled = torch.compile(lambda x: module.send(x) * 2, backend="eager", fullgraph=True)
        assert torch.equal(compiled(torch.ones(3)), torch.full((3,), 4.0))


@pytest.mark.parametrize("stride", [None, (1, 29)])
def test_placeholders_are_known_by_a_torch_that_cannot_refuse_their_bytes(
    stride: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There strides are 0: nothing reads behind their one element."""
    monkeypatch.setattr(placeholder, "refuse", lambda *_: False)
    made = placeholder.shared_placeholder(
        torch.Size((29, 31)), torch.float64, torch.device("cpu"), stride
    )
    assert made.stride() == (0, 0) and placeholder.is_placeholder(made)
    assert not placeholder.is_placeholder(torch.zeros(29, 31, dtype=torch.float64))
