"""Modules of torch's around a wrapped model: DistributedDataParallel, and what compile returns."""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import support_replicas as replicas
import torch
import torch.distributed as dist
from support_nn import assert_same, same_bits, seed
from support_scripts import run_at_once
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import tiermem

HERE = Path(replicas.__file__)
SECONDS = 240
"""Of processor time, for a process."""

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="torch has no gloo here"
)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A group of one process."""
    file = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("room", ["256KiB", "1MiB"])
@pytest.mark.parametrize("case", replicas.CASES)
def test_data_parallel_around_a_wrapped_model_is_that_of_the_resident_one(
    case: str, room: str
) -> None:
    """Where not all that a step needs fits, and where it does."""
    replicas.run(case, replace(replicas.ON_HOST, room=room))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("tight", [False, True])
def test_reduced_gradients_stay_ordinary_tensors(tight: bool) -> None:
    """They would only go home, and come up again for the step."""
    with replace(replicas.ON_HOST, room="1MiB").tier(tight=tight) as tier:
        model = tier.wrap(replicas.Net())
        around = DistributedDataParallel(model, init_sync=False)
        optimizer = tier.optimizer(model, torch.optim.AdamW)
        for _ in range(5):
            tier.reset_stats()
            around(torch.ones(2, replicas.WIDTH)).sum().backward()
            assert "hbm->dram" not in tier.stats().links
            optimizer.step()
            assert {type(param.grad) for param in model.parameters()} == {torch.Tensor}
            optimizer.zero_grad()


def test_several_processes_train_as_those_with_resident_models(tmp_path: Path) -> None:
    lines = [[str(rank), "2", str(tmp_path / "store")] for rank in range(2)]
    for out in run_at_once(HERE, lines, tmp_path, SECONDS):
        assert out.split() == ["equal", str(len(replicas.CASES))]


@pytest.fixture
def tier() -> Iterator[tiermem.TierManager]:
    with tiermem.TierManager("cpu", hbm=replicas.LEAST, dram="4MiB") as tier:
        yield tier


@pytest.mark.usefixtures("alone")
def test_weights_that_do_not_fit_at_once_are_broadcast_as_join_ends(
    tier: tiermem.TierManager,
) -> None:
    model = tier.wrap(replicas.Net())
    around = DistributedDataParallel(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with around.join():
        around(torch.ones(2, replicas.WIDTH)).sum().backward()
    after = model.state_dict()
    assert all(same_bits(before[name], after[name]) for name, _ in model.named_parameters())


@pytest.mark.usefixtures("alone")
def test_buffers_that_are_broadcast_stay_in_hbm_until_unwrapped(tier: tiermem.TierManager) -> None:
    model = tier.wrap(replicas.Net())
    tight = tier.wrap(nn.Sequential(nn.Linear(8, 8)))
    tight.register_buffer("late", torch.zeros(8))  # is no business of tiermem's
    around = DistributedDataParallel(model, init_sync=False)
    held = [g for g in tier._runtime.groups if g.buffers and g.holds]
    assert [g.block.name for g in held] == ["Net.buffers"]
    around(torch.ones(2, replicas.WIDTH))
    around(torch.ones(2, replicas.WIDTH))
    assert same_bits(model.state_dict()["seen"], torch.full((32, replicas.WIDTH), 2.0))
    tier.unwrap(model)
    assert not held[0].holds
    assert same_bits(model.seen, torch.full((32, replicas.WIDTH), 2.0))


@pytest.mark.usefixtures("alone")
def test_buffers_that_are_broadcast_and_have_no_room_are_refused_at_once() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
            self.first = nn.Module()
            self.first.register_buffer("table", torch.ones(8192))
            self.last = nn.Module()
            self.last.register_buffer("table", torch.ones(8192))

    with tiermem.TierManager("cpu", hbm="56KiB", dram="4MiB") as tier:
        model = tier.wrap(Wide(), blocks=["first", "last", "inner.0", "inner.1"])
        with pytest.raises(tiermem.CapacityError, match="broadcasts the buffers of its module"):
            DistributedDataParallel(model, init_sync=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # newer versions of torch have another name
            DistributedDataParallel(model, init_sync=False, broadcast_buffers=False)
        assert not any(group.buffers and group.holds for group in tier._runtime.groups)


@pytest.mark.usefixtures("alone")
def test_what_cannot_be_followed_is_refused_before_backward(tier: tiermem.TierManager) -> None:
    x = torch.ones(2, replicas.WIDTH)
    model = tier.wrap(replicas.Net())
    views = DistributedDataParallel(model, init_sync=False, gradient_as_bucket_view=True)
    with pytest.raises(tiermem.WrapError, match=r"gradient_as_bucket_view=True.*leave that option"):
        views(x)
    around = DistributedDataParallel(model, init_sync=False)
    around.device = torch.device("meta")  # as if made before the model went to another device
    with pytest.raises(tiermem.WrapError, match=r"wrap first, .*\(tier\.wrap\(model\)\)"):
        around(x)
    around = DistributedDataParallel(model, init_sync=False)
    optimizer = tier.optimizer(model, torch.optim.SGD, lr=0.1, overlap="backward")
    with pytest.raises(tiermem.StepError, match="overlap='backward' makes steps before"):
        around(x)
    optimizer.close()
    with pytest.raises(tiermem.WrapError, match=r"DistributedDataParallel\(tier\.wrap\(model\)\)"):
        tier.wrap(around)


@pytest.mark.usefixtures("alone")
def test_a_model_that_was_replicated_before_is_refused(tier: tiermem.TierManager) -> None:
    """Its buffers would be broadcast while they are away, and no block could leave."""
    model = replicas.Net()
    before = DistributedDataParallel(model.extra)
    with pytest.raises(tiermem.WrapError, match=r"made before tier\.wrap.*make that anew"):
        tier.wrap(model)
    assert type(model.extra.weight) is nn.Parameter
    before.itself = [before]  # only the collector finds out that nobody has it
    del before
    around = DistributedDataParallel(tier.wrap(model), init_sync=False)
    around(torch.ones(2, replicas.WIDTH)).sum().backward()
    tier.unwrap(model)
    with pytest.raises(tiermem.WrapError, match=r"DistributedDataParallel\(tier\.wrap\(model\)\)"):
        tier.wrap(model)


@pytest.mark.usefixtures("alone")
def test_parameters_replicated_without_their_modules_are_refused(
    tier: tiermem.TierManager,
) -> None:
    """torch's ``replicate`` makes a list of them as the model is called first."""
    model = tier.wrap(replicas.Net())

    def replicate(module: nn.Module, args: object) -> None:
        DistributedDataParallel(nn.ParameterList(module.parameters()), init_sync=False)

    hook = model.register_forward_pre_hook(replicate)
    x = torch.ones(2, replicas.WIDTH)
    with pytest.raises(tiermem.WrapError, match=r"replicate\(\).*\(tier\.wrap\(model\)\)"):
        model(x)
    hook.remove()
    DistributedDataParallel(nn.ParameterList([nn.Parameter(x)]))
    DistributedDataParallel(model, init_sync=False)(x).sum().backward()


@pytest.mark.usefixtures("alone")
def test_a_model_that_is_only_called_inside_is_no_part_of_it(tier: tiermem.TierManager) -> None:
    class Student(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + teacher[0](x)

    teacher = [tier.wrap(nn.Linear(replicas.WIDTH, replicas.WIDTH))]  # a list: no child
    around = DistributedDataParallel(
        Student(replicas.WIDTH, replicas.WIDTH), gradient_as_bucket_view=True
    )
    around(torch.ones(2, replicas.WIDTH)).sum().backward()
    assert same_bits(teacher[0].bias.grad.clone(), torch.full((replicas.WIDTH,), 2.0))
    assert not tier._runtime.backward.reduced.active


@pytest.mark.usefixtures("alone")
def test_around_a_part_of_a_wrapped_model() -> None:
    x = torch.linspace(-1, 1, 2 * replicas.WIDTH).reshape(2, replicas.WIDTH)
    seed(3)
    plain = replicas.Net()
    with tiermem.TierManager("cpu", hbm="256KiB", dram="4MiB") as tier:
        seed(3)
        model = tier.wrap(replicas.Net())
        for each in (plain, model):
            DistributedDataParallel(each.extra)(x).square().sum().backward()
        assert same_bits(model.extra.weight.grad.clone(), plain.extra.weight.grad)


@pytest.mark.usefixtures("alone")
def test_sums_in_another_dtype_are_refused_where_they_would_be_cut() -> None:
    x = torch.ones(2, replicas.WIDTH, dtype=torch.bfloat16)
    with tiermem.TierManager("cpu", hbm="256KiB", dram="4MiB") as tier:
        model = tier.wrap(nn.Linear(replicas.WIDTH, replicas.WIDTH).bfloat16())
        around = DistributedDataParallel(model)
        optimizer = tier.optimizer(model, torch.optim.SGD, lr=0.1, grad_dtype=torch.float32)
        around(x).sum().backward()
        with pytest.raises(tiermem.StepError, match="grad_dtype"):
            around(x)
        optimizer.zero_grad()
        around(x).sum().backward()
        optimizer.step()


@pytest.mark.usefixtures("alone")
def test_a_gradient_asked_for_by_itself_leaves_the_reducer_alone() -> None:
    x = torch.linspace(-1, 1, 2 * replicas.WIDTH).reshape(2, replicas.WIDTH)
    with tiermem.TierManager("cpu", hbm="256KiB", dram="4MiB") as tier:
        models = []
        for tiered in (False, True):
            seed(4)
            model = nn.Linear(replicas.WIDTH, replicas.WIDTH)
            around = DistributedDataParallel(tier.wrap(model) if tiered else model)
            out = around(x).square().sum()
            (weight,) = torch.autograd.grad(out, [model.weight], retain_graph=True)
            with around.no_sync():
                (around(x).sum() + out).backward()
            models.append((weight, model.weight.grad.clone(), model.bias.grad.clone()))
        assert all(same_bits(a, b) for a, b in zip(*models, strict=True))


@pytest.mark.usefixtures("alone")
def test_collectives_write_what_is_in_the_tiers_and_read_what_is_not(
    tier: tiermem.TierManager,
) -> None:
    """Some ask the class of what is sent alone, some of what is received alone."""
    model = tier.wrap(replicas.Net())
    model(torch.ones(2, replicas.WIDTH)).sum().backward()
    weights = [layer[0].weight for layer in model.layers]
    gradient, given = weights[0].grad, torch.rand(5, replicas.WIDTH, replicas.WIDTH)
    with torch.no_grad():
        dist.all_gather([weights[0]], given[0])
        dist.scatter(weights[1], [weights[0]])
        dist.gather(given[1], [weights[2]])
        dist.reduce_scatter(weights[3], [given[2]])
        work = dist.all_gather([gradient], given[3], async_op=True)
        work.wait()
        dist.reduce_scatter(given[4], [gradient])
    found = [*(weight.detach().clone() for weight in weights[:4]), gradient.clone(), given[4]]
    wanted = [given[0], given[0], given[1], given[2], given[3], given[3]]
    assert_same(found, wanted, "exchanged")
    received = [None]
    dist.scatter_object_list(received, [gradient])
    assert same_bits(received[0], given[3])
    early = dist.all_gather.__wrapped__  # as programs have it that imported it before tiermem
    if "has_torch_function" in inspect.unwrap(early).__code__.co_names:
        with torch.no_grad():
            early([weights[2]], weights[0])
        model(torch.ones(2, replicas.WIDTH))
        assert same_bits(weights[2].detach().clone(), given[0])


class Sharing(torch.optim.SGD):
    """Steps, and sends what its process has stepped to the others, as ZeroRedundancyOptimizer."""

    def step(self, closure: None = None) -> None:
        super().step()
        for param in self.param_groups[0]["params"]:
            dist.broadcast(param.data, 0)


class Summing(torch.optim.SGD):
    """Adds up the gradients of all processes, and steps."""

    def step(self, closure: None = None) -> None:
        dist.barrier()
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                dist.all_reduce(param.grad)
        super().step()


@pytest.mark.usefixtures("alone")
def test_an_optimizer_that_shares_parameters_out_among_processes_is_refused(
    tier: tiermem.TierManager,
) -> None:
    """Each process would find something else as it tries the class, and wait for the others."""
    model = tier.wrap(replicas.Net())
    with pytest.raises(tiermem.StepError, match=r"Sharing.*shares parameters out.*broadcast_"):
        tier.optimizer(model, Sharing, lr=0.1)
    optimizer = tier.optimizer(model, Summing, lr=0.1)
    before = model.extra.bias.detach().clone()
    model(torch.ones(2, replicas.WIDTH)).sum().backward()
    optimizer.step()
    assert same_bits(model.extra.bias.detach().clone(), before - 0.1 * 2)


def test_weights_in_buckets_of_an_optimizer_are_refused(tier: tiermem.TierManager) -> None:
    """It would send the buckets to other processes, and the weights would stay what they are."""
    code = "def _build_param_buckets(param, bucket): param.data = bucket.view_as(param)"
    names: dict[str, Callable[..., None]] = {}
    exec(compile(code, "zero_redundancy_optimizer.py", "exec"), names)
    model = tier.wrap(replicas.Net())
    weight, before = model.extra.weight, model.extra.weight.detach().clone()
    with pytest.raises(tiermem.ParameterError, match="parameters_as_bucket_view=True"):
        names["_build_param_buckets"](weight, torch.ones(before.numel()))
    assert same_bits(weight.detach().clone(), before)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_one_graph_of_several_blocks_is_refused_in_one_sentence() -> None:
    with tiermem.TierManager("cpu", hbm=replicas.LEAST, dram="4MiB") as tier:
        model = tier.wrap(replicas.Net())
        for compile in (
            lambda: torch.compile(model, fullgraph=True),
            lambda: model.compile(fullgraph=True),
        ):
            with pytest.raises(tiermem.WrapError, match="compiled block by block"):
                compile()
        torch.compile(model)
        torch.compile(nn.Linear(2, 2), fullgraph=True)
        model.extra.compile(fullgraph=True, backend="eager")
        tier.unwrap(model)
        torch.compile(model, fullgraph=True)


def test_data_parallel_around_a_wrapped_model_is_the_resident_one(
    tier: tiermem.TierManager,
) -> None:
    torch.manual_seed(0)
    resident = replicas.Net()
    model = tier.wrap(deepcopy(resident))
    pair = nn.DataParallel(resident), nn.DataParallel(model)
    for step in range(3):
        x = torch.rand(2, replicas.WIDTH, generator=torch.Generator().manual_seed(step))
        outputs = [around(x) for around in pair]
        assert same_bits(*outputs)
        for output in outputs:
            output.sum().backward()
    for ours, plain in zip(model.parameters(), resident.parameters(), strict=True):
        assert same_bits(ours.grad.clone(), plain.grad)


def test_data_parallel_over_several_devices_is_refused(
    tier: tiermem.TierManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Says so before torch has looked for the devices, of which there are none here."""
    torchs = sys.modules[nn.DataParallel.__module__]
    monkeypatch.setattr(torchs, "_get_available_device_type", lambda: "cuda")
    model = tier.wrap(replicas.Net())
    with pytest.raises(tiermem.WrapError, match=r"2 devices.*device_ids=\[0\]"):
        nn.DataParallel(model, device_ids=[0, 1])
    model(torch.ones(2, replicas.WIDTH)).sum().backward()


def test_what_fsdp_has_sharded_is_refused_by_name() -> None:
    from torch.distributed.fsdp import FSDPModule

    model = nn.Sequential(nn.Linear(4, 4))
    model.__class__ = type("FSDPSequential", (FSDPModule, nn.Sequential), {})  # as fully_shard does
    with (
        tiermem.TierManager("cpu", hbm="1MiB", dram="1MiB") as tier,
        pytest.raises(tiermem.WrapError, match="sharded by torch's FSDP"),
    ):
        tier.wrap(model)


@pytest.mark.usefixtures("alone")
def test_fsdp_around_a_wrapped_model_is_refused_by_name(tier: tiermem.TierManager) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    model = tier.wrap(replicas.Net())
    before = model.state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of one process, which shards nothing
        with pytest.raises(tiermem.WrapError, match="either FSDP or tiers"):
            FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    assert_same(model.state_dict(), before, "as it was")
    with pytest.raises(tiermem.ParameterError, match="either FSDP or tiers"):
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))


def test_buffers_that_forwards_have_made_are_moved_with_the_model(
    tier: tiermem.TierManager,
) -> None:
    class Averaging(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.register_buffer("average", torch.zeros(8))
            self.register_buffer("kept", torch.ones(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.average = self.average + x
            self.again = self.average  # a tie
            return self.linear(x)

    model = Averaging()
    model.register_buffer("again", None)
    tier.wrap(model)
    model(torch.ones(8))
    wrapped = tier._wrapped[id(model)]
    wrapped.move_made(torch.device("cpu"))  # where it is: nothing moves
    assert torch.equal(model.average, torch.ones(8))
    wrapped.move_made(torch.device("meta"))
    assert model.average.device.type == "meta" and model.average is model.again
    assert torch.equal(model.kept, torch.ones(8))
    model.average = model.again = torch.zeros(8)
