"""Training loops as people write them, over tiers and in plain torch: every bit they look at."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support_nn import asked, assert_same, check_table, same_bits, seed
from torch import nn
from torch.func import functional_call
from torch.nn import functional
from torch.profiler import profile

import tiermem
from tiermem.nn.tensors import placeholder
from tiermem.optim.units.parted import PartedUnit

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")
WIDTH = 32
HOMES: dict[str, dict[str, Any]] = {
    "little": {"hbm": "60KiB", "dram": "8MiB"},
    "disk": {"hbm": "60KiB", "dram": "600KiB", "nvme_bytes": "16MiB"},
    "nothing said": {},
}


class Run:
    """What a script is given: a manager, or none."""

    def __init__(self, tier: tiermem.TierManager | None = None) -> None:
        self.tier = tier
        self.models: list[nn.Module] = []
        self.optimizers: list[Any] = []
        self.seen: list[Any] = []

    def wrap(self, model: Any) -> Any:
        self.models.append(model)
        return model if self.tier is None else self.tier.wrap(model)

    def optimizer(self, params: Any, cls: Any, **settings: Any) -> Any:
        if self.tier is not None:
            made: Any = self.tier.optimizer(params, cls, **settings)
        else:
            made = cls(params.parameters() if isinstance(params, nn.Module) else params, **settings)
        self.optimizers.append(made)
        return made

    def see(self, *values: Any) -> None:
        self.seen.append([copied(value) for value in values])


def copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: copied(item) for key, item in value.items()}
    return [copied(item) for item in value] if isinstance(value, list | tuple) else value


Script = Callable[[Run], None]
SCRIPTS: dict[str, Script] = {}


def script(function: Script) -> Script:
    SCRIPTS[function.__name__] = function
    return function


def layers(count: int = 4, out: int = WIDTH) -> nn.Sequential:
    inner = [m for _ in range(count) for m in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(*inner, nn.Linear(WIDTH, out))


def x(rows: int = 3) -> torch.Tensor:
    return torch.randn(rows, WIDTH)


def made(script: Script, run: Run) -> Run:
    seed(11)
    script(run)
    run.see(
        *(model.state_dict() for model in run.models),
        *([p.grad for p in model.parameters() if p.grad is not None] for model in run.models),
        *(optimizer.state_dict() for optimizer in run.optimizers),
    )
    return run


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.proj, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.attention(self.norm(x)).chunk(3, -1)
        return x + self.drop(
            self.proj(functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        )


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(48, WIDTH), nn.Linear(WIDTH, 48, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.embed.weight = self.head.weight
        self.apply(lambda m: nn.init.normal_(m.weight, 0, 0.02) if hasattr(m, "weight") else None)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


@script
def small_gpt(run: Run) -> None:
    """Two groups, micro-batches, a scaler, clipping, evaluation in between, and a resume."""
    model = run.wrap(Gpt())
    params = list(model.parameters())
    groups = [
        {"params": [p for p in params if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = run.optimizer(groups, torch.optim.AdamW, lr=1e-3, betas=(0.9, 0.95), fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    file = io.BytesIO()
    for step in range(3):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * (step + 1)
        model.eval()
        with torch.no_grad():
            run.see(model(*torch.randint(48, (2, 2, 8))))
        model.train()
        for _ in range(2):
            scaler.scale(model(*torch.randint(48, (2, 2, 8))) / 2).backward()
        scaler.unscale_(optimizer)
        run.see(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        if step == 1:
            torch.save([model.state_dict(), optimizer.state_dict()], file)
    file.seek(0)
    weights, state = torch.load(file)
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)
    loss = model(*torch.randint(48, (2, 2, 8)))
    loss.backward()
    optimizer.step()


@script
def adversaries(run: Run) -> None:
    """Two models, an optimizer each; gradients of the second pass through the first."""
    generator, critic = run.wrap(layers(2)), run.wrap(layers(2, 1))
    generator.apply(lambda m: nn.init.normal_(m.weight, 0, 0.2) if hasattr(m, "weight") else None)
    for_critic = run.optimizer(critic, torch.optim.Adam, lr=1e-3, betas=(0.5, 0.9))
    for_generator = run.optimizer(generator.parameters(), torch.optim.RMSprop, lr=1e-3)
    for _ in range(3):
        critic.zero_grad()
        real, fake = x(), generator(x())
        mixed = torch.lerp(real, fake.detach(), torch.rand(3, 1)).requires_grad_()
        (slope,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
        penalty = (slope.norm(2, dim=1) - 1).square().mean()
        loss = critic(fake.detach()).mean() - critic(real).mean() + 10 * penalty
        loss.backward()
        for_critic.step()
        generator.zero_grad()
        critic(fake).mean().neg().backward()
        for_generator.step()
        run.see(loss, penalty)


class Momentum(nn.Module):
    """Its second half follows the first, by new tensors as ``data``, within forward."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = layers(2), layers(2)
        self.register_buffer("queue", torch.randn(WIDTH, 16))
        for p in self.key.parameters():
            p.requires_grad = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for theirs, own in zip(self.query.parameters(), self.key.parameters(), strict=True):
                own.data = own.data * 0.9 + theirs.data * 0.1
            key = self.key(x)
        found = self.query(x)
        logits = torch.cat([(found * key).sum(1, True), found @ self.queue.clone()], 1)
        self.queue[:, : len(key)] = key.T
        return logits.logsumexp(1).mean()


@script
def momentum_encoder(run: Run) -> None:
    model = run.wrap(Momentum())
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = run.optimizer(params, torch.optim.SGD, lr=0.1, momentum=0.9)
    for _ in range(3):
        loss = model(x())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.see(loss)


@script
def average_in_place_of_the_weights(run: Run) -> None:
    """The class that goes round: the weights' data are set aside, and put back, uncopied."""
    model = run.wrap(layers())
    optimizer = run.optimizer(model, torch.optim.Adam, lr=1e-2)
    shadow = {name: p.data.clone() for name, p in model.named_parameters()}
    for _ in range(3):
        model(x()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        for name, p in model.named_parameters():
            shadow[name] = (0.1 * p.data + 0.9 * shadow[name]).clone()
        backup = {}
        for name, p in model.named_parameters():
            backup[name] = p.data
            p.data = shadow[name]
        with torch.no_grad():
            run.see(model(torch.ones(1, WIDTH)), backup)
        for name, p in model.named_parameters():
            p.data = backup[name]
        run.see(model.state_dict())


@script
def data_that_changes_hands(run: Run) -> None:
    model = run.wrap(layers())
    first, second = model[0].weight, model[2].weight
    first.data, second.data = second.data, first.data
    run.see(first, second)
    kept, also = first.data, first.detach()
    first.data = torch.ones(WIDTH, WIDTH)
    run.see(kept, also, first, second)
    also.mul_(2)  # they are one memory as before, and no longer the weight's
    run.see(kept, first, model(torch.ones(1, WIDTH)))
    now = first.data
    first.data = now  # the same memory
    now.mul_(0.5)
    run.see(first, now)
    first.data = nn.Parameter(torch.ones(WIDTH, WIDTH))
    run.see(first, now)
    first.data = model[4].weight  # a parameter that is away itself
    run.see(first, now)


@script
def inner_steps(run: Run) -> None:
    """A gradient through steps on other values of the parameters."""
    model = run.wrap(layers(2, 1))
    optimizer = run.optimizer(model, torch.optim.Adam, lr=1e-2)
    for _ in range(2):
        fast, data = dict(model.named_parameters()), x()
        for _ in range(2):
            loss = functional_call(model, fast, (data,)).square().mean()
            found = torch.autograd.grad(loss, list(fast.values()), create_graph=True)
            fast = {n: p - 0.1 * g for (n, p), g in zip(fast.items(), found, strict=True)}
        loss = functional_call(model, fast, (x(),)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.see(loss)


@script
def each_layer_by_itself(run: Run) -> None:
    """Forward-forward: an optimizer a layer, and no backward through the whole."""
    model = run.wrap(layers())
    linear = [m for m in model if isinstance(m, nn.Linear)]
    optimizers = [run.optimizer(m.parameters(), torch.optim.Adam, lr=0.02) for m in linear]
    given = x()
    for layer, optimizer in zip(linear, optimizers, strict=True):
        for _ in range(2):
            loss = (functional.relu(layer(given)).square().mean(1) - 1).exp().log1p().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.see(loss)
        given = layer(given).detach()


@script
def closures(run: Run) -> None:
    """A plain optimizer of all parameters at once."""
    model = run.wrap(layers(2))
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3, line_search_fn="strong_wolfe")
    data = x()

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = (model(data) - data).square().mean()
        loss.backward()
        return loss

    run.see(optimizer.step(closure), optimizer.step(closure))


@script
def perturbed_in_inference_mode(run: Run) -> None:
    model = run.wrap(layers())
    with torch.inference_mode():
        for number in range(2):
            losses = []
            for scale in (1, -2, 1):
                seed(number)
                for p in model.parameters():
                    p.data = p.data + scale * 1e-2 * torch.randn(p.shape)
                losses.append(model(torch.ones(2, WIDTH)).square().mean())
            run.see(losses)


@script
def gradients_of_another_model(run: Run) -> None:
    """Actors give their gradients to the model that is stepped."""
    shared, actor = run.wrap(layers(2)), run.wrap(layers(2))
    optimizer = run.optimizer(shared, torch.optim.Adam, lr=1e-2)
    for _ in range(2):
        actor.load_state_dict(shared.state_dict())
        optimizer.zero_grad()
        actor(x()).square().mean().backward()
        for theirs, own in zip(actor.parameters(), shared.parameters(), strict=True):
            own._grad = theirs.grad
        optimizer.step()
        actor.zero_grad()


@dataclass
class Output:
    last: torch.Tensor
    all: list[torch.Tensor]
    again: Callable[[torch.Tensor], torch.Tensor]


class Steps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.each = nn.ParameterList(torch.randn(WIDTH, WIDTH) * 0.1 for _ in range(4))

    def forward(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
        for weight in self.each:
            x = torch.tanh(x @ weight)
            yield x


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.steps, self.last = Steps(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, *, stop: int) -> Output:
        found = [y for _, y in zip(range(stop), self.steps(x), strict=False)]
        return Output(self.last(found[-1]), found, lambda y: self.last(y) * self.last.weight.sum())


@script
def generators_and_dataclasses(run: Run) -> None:
    model = run.wrap(Whole())
    optimizer = run.optimizer(model, torch.optim.Adam, lr=1e-2)
    for stop in (4, 2, 3):
        out = model(x(), stop=stop)
        loss = out.last.square().mean() + sum(y.mean() for y in out.all) + out.again(x()).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.see(loss)


@script
def sparse_tables(run: Run) -> None:
    """State that is sparse itself, and state that is not."""

    class Tables(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag = nn.EmbeddingBag(24, WIDTH, sparse=True, mode="sum")
            self.one, self.last = nn.Embedding(24, WIDTH, sparse=True), nn.Linear(WIDTH, 4)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.last(self.bag(ids) + self.one(ids[:, 0]))

    model = run.wrap(Tables())
    optimizers = [
        run.optimizer([model.bag.weight], torch.optim.SGD, lr=0.1, momentum=0.9),
        run.optimizer([model.one.weight], torch.optim.Adagrad, lr=0.1),
        run.optimizer(model.last, torch.optim.Adam, lr=0.1),
    ]
    for _ in range(3):
        loss = model(torch.randint(24, (3, 4))).square().mean()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        run.see(loss)


@script
def a_range_of_rates(run: Run) -> None:
    """Tries learning rates, goes back, and begins with another scheduler, from the rate of then."""
    model = run.wrap(layers(2))
    optimizer = run.optimizer(model, torch.optim.SGD, lr=1e-3)
    before = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
    for kind in (torch.optim.lr_scheduler.ExponentialLR, torch.optim.lr_scheduler.StepLR):
        scheduler = kind(optimizer, 2)
        for _ in range(2):
            model(x()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            run.see(scheduler.get_last_lr(), optimizer.param_groups[0]["initial_lr"])
        model.load_state_dict(before[0])
        optimizer.load_state_dict(before[1])
        optimizer.param_groups[0]["lr"] = 0.5


@script
def what_is_trained_by_the_state_dict(run: Run) -> None:
    """With ``keep_vars`` it has the parameters themselves."""
    model = run.wrap(layers())
    model[0].requires_grad_(False)
    state = model.state_dict(keep_vars=True)
    run.see([key for key, value in state.items() if value.requires_grad], state)
    run.see([value is found for value, found in zip(state.values(), model.parameters())])  # noqa: B905


@script
def gradients_in_one_buffer(run: Run) -> None:
    """They are parts of it for good, and what is done to it is done to them."""
    model = run.wrap(layers(2))
    optimizer = run.optimizer(model, torch.optim.Adam, lr=1e-2)
    buffer = torch.zeros(sum(p.numel() for p in model.parameters()))
    for p, part in zip(
        model.parameters(), buffer.split([p.numel() for p in model.parameters()]), strict=True
    ):
        p.grad = part.view_as(p)
    del p, part
    for _ in range(5):
        for _ in range(2):
            model(x()).square().mean().backward()
        run.see(buffer)
        buffer.div_(buffer.norm())
        optimizer.step()
        buffer.zero_()


class Unmerged(nn.Module):
    """What adapters do that were merged into a layer: it takes them out within its forward."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.merged = inner, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.merged:
            self.inner.weight.data -= 0.1
        self.merged = False
        return self.inner(x)


@script
def modules_that_are_put_in_later(run: Run) -> None:
    """Their code writes weights that the call around them holds."""
    model = run.wrap(nn.Sequential(*(Block() for _ in range(6))))
    with torch.no_grad():
        run.see(model(x().unsqueeze(0)))
        for block in model:
            block.proj = Unmerged(block.proj)
        for merged in (False, True, False, False):
            for block in model:
                block.proj.merged = merged
            run.see(model(x().unsqueeze(0)))


@script
def hooks_that_are_put_on_later(run: Run) -> None:
    """They write weights by ways that torch does not count."""
    model = run.wrap(layers(30))

    def clip(module: Any, *_: Any) -> None:
        module.weight.data.clamp_(-0.1, 0.1)

    def shrink(module: Any, *_: Any) -> None:
        array = module.bias.detach().numpy()
        array *= 0.5

    with torch.no_grad():
        run.see(model(x()))
        handles = [model[4].register_forward_hook(clip), model[2].register_forward_pre_hook(shrink)]
        for _ in range(2):
            run.see(model(x()))
        for handle in handles:
            handle.remove()
        run.see(model(x()), model(x()))


@script
def hooks_of_all_modules(run: Run) -> None:
    model = run.wrap(layers(30))

    def shrink(module: Any, *_: Any) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.mul_(0.99)

    with torch.no_grad():
        run.see(model(x()))
        handle = nn.modules.module.register_module_forward_hook(shrink)
        try:
            run.see(model(x()), model(x()))
        finally:
            handle.remove()
        run.see(model(x()), model(x()))


@script
def forwards_that_are_replaced_later(run: Run) -> None:
    """By functions that write weights in ways that torch does not count."""
    model = run.wrap(layers(30))

    def shrinking(module: Any, factor: float) -> Callable[..., Any]:
        def forward(x: torch.Tensor) -> torch.Tensor:
            module.weight.data.mul_(factor)
            return type(module).forward(module, x)

        return forward

    with torch.no_grad():
        run.see(*[model(x()) for _ in range(3)])
        for factor in (0.9, 1.05):  # the second in the place of the first
            model[2].forward = shrinking(model[2], factor)
            model[4].forward = shrinking(model[4], factor)
            run.see(*[model(x()) for _ in range(4)])
        del model[2].forward, model[4].forward
        run.see(model(x()), model(x()))


class Twofold(nn.Linear):
    """Has a part that may be replaced."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


class Shrinks(Twofold):
    def inner(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.data.mul_(0.9)
        return super().inner(x)


@script
def code_that_comes_later(run: Run) -> None:
    """They write weights in ways that torch does not count."""
    model = run.wrap(nn.Sequential(*[Twofold(WIDTH, WIDTH) for _ in range(30)]))

    def inner(x: torch.Tensor) -> torch.Tensor:
        model[2].weight.data.mul_(0.9)
        return Twofold.inner(model[2], x)

    with torch.no_grad():
        run.see(*[model(x()) for _ in range(3)])
        model[2].inner = inner
        run.see(*[model(x()) for _ in range(4)])
        model[4].__class__ = Shrinks
        run.see(*[model(x()) for _ in range(4)])


def reading(weight: torch.Tensor) -> torch.Tensor:
    """Writes nothing."""
    return weight


def shrinking(weight: torch.Tensor) -> torch.Tensor:
    weight.data.mul_(0.9)
    return weight


def halving(weight: torch.Tensor) -> torch.Tensor:
    weight.data.mul_(0.5)
    return weight


helper = reading


def replaced_again(way: Callable[[Any, Any], None]) -> Script:
    """Returns a script in which code is replaced under its name, at last by such as writes."""

    def run_it(run: Run) -> None:
        class Own(nn.Linear):
            def __init__(self) -> None:
                super().__init__(WIDTH, WIDTH)
                self.own = reading

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return functional.linear(x, self.part(helper(self.own(self.weight))), self.bias)

            def part(self, weight: torch.Tensor) -> torch.Tensor:
                return weight

        globals()["helper"] = reading
        model = run.wrap(nn.Sequential(*[Own() for _ in range(30)]))
        with torch.no_grad():
            run.see(*[model(x()) for _ in range(3)])
            for code in (lambda weight: weight, shrinking, halving):
                way(model[2], code)
                run.see(*[model(x()) for _ in range(4)])

    return run_it


for _name, _way in {
    "an_instance_s_function": lambda module, code: setattr(module, "own", code),
    "an_instance_s_method": lambda module, code: setattr(module, "part", code),
    "a_class_s_method": lambda module, code: setattr(type(module), "part", staticmethod(code)),
    "a_class_s_forward": lambda module, code: setattr(
        type(module), "forward", lambda self, x: functional.linear(x, code(self.weight), self.bias)
    ),
    "a_file_s_function": lambda module, code: globals().update(helper=code),
}.items():
    SCRIPTS[f"{_name}_that_is_replaced_again"] = replaced_again(_way)


@contextmanager
def tiers(homes: str, folder: Path) -> Iterator[tiermem.TierManager]:
    given = dict(HOMES[homes])
    if "nvme_bytes" in given:
        given["nvme"] = str(folder)
    with tiermem.TierManager(device="cpu", **given) as tier:
        yield tier


@pytest.mark.parametrize("homes", HOMES)
@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.one_in(3)
def test_the_bits_of_plain_torch(name: str, homes: str, tmp_path: Path) -> None:
    plain = made(SCRIPTS[name], Run())
    with tiers(homes, tmp_path) as tier:
        run = made(SCRIPTS[name], Run(tier))
        check_table(tier)
    assert_same(plain.seen, run.seen, name)
    for theirs, own in zip(plain.models, run.models, strict=True):
        assert [type(p) for p in own.parameters()] == [type(p) for p in theirs.parameters()]
        assert_same(dict(theirs.state_dict()), dict(own.state_dict()), "at the end")


# -- what cannot be, or is not there yet ---------------------------------------------------------


class Table(nn.Module):
    def __init__(self, *, functional: bool) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(400, WIDTH, sparse=True), nn.Linear(WIDTH, 4)
        self.table.sparse = not functional

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.last(functional.embedding(ids, self.table.weight, sparse=True))


@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.Adagrad])
def test_a_sparse_gradient_is_never_in_runs(cls: Any) -> None:
    """A dense one would be, with this budget; what is refused runs with what the error says."""

    def run(hbm: int) -> nn.Module:
        seed(3)
        with tiermem.TierManager(device="cpu", hbm=hbm, dram="4MiB") as tier:
            model = tier.wrap(Table(functional=False))
            optimizer = tier.optimizer(model, cls, lr=0.1)
            assert not any(isinstance(unit, PartedUnit) for unit in optimizer._units)
            model(torch.randint(400, (3, 4))).square().mean().backward()
            optimizer.step()
        return model

    with pytest.raises(tiermem.CapacityError) as refused:
        run(72 << 10)
    tier_name, enough = asked(refused.value)
    assert tier_name == "hbm"
    seed(3)
    plain = Table(functional=False)
    plain(torch.randint(400, (3, 4))).square().mean().backward()
    cls(plain.parameters(), lr=0.1).step()
    assert_same(dict(plain.state_dict()), dict(run(enough).state_dict()), "weights")


def test_a_sparse_gradient_that_no_module_told_of_is_refused_where_steps_have_parts() -> None:
    with tiermem.TierManager(device="cpu", hbm="72KiB", dram="4MiB") as tier:
        model = tier.wrap(Table(functional=True))
        before = {name: value.clone() for name, value in model.state_dict().items()}
        optimizer = tier.optimizer(model, torch.optim.SGD, lr=0.1)
        model(torch.randint(400, (3, 4))).square().mean().backward()
        with pytest.raises(tiermem.StepError, match=r"table\.weight' is sparse, .* in parts"):
            optimizer.step()
        assert same_bits(model.state_dict()["table.weight"], before["table.weight"])
        optimizer.abandon_step()


def operands(model: nn.Module, optimizer: Any, **settings: Any) -> list[Any]:
    """Returns the shapes of the operands of a model's products in two steps."""
    with profile(**settings) as found:
        for _ in range(2):
            model(torch.ones(2, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [e.input_shapes for e in found.events() if e.name == "aten::addmm"]


def test_the_profiler_sees_the_shapes_of_the_resident_run(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asks every operand for its address, also while its block is elsewhere."""
    plain = layers()
    expected = operands(plain, torch.optim.SGD(plain.parameters()), record_shapes=True)
    assert expected and all(shapes[2] for shapes in expected)
    with tiermem.TierManager(device="cpu", hbm="24KiB", dram="4MiB") as tier:
        model = tier.wrap(layers())
        optimizer = tier.optimizer(model, torch.optim.SGD, lr=1e-3)
        capfd.readouterr()
        assert operands(model, optimizer, record_shapes=True) == expected
        assert not placeholder._readable
        assert len(operands(model, optimizer)) == len(expected)
        assert "RecordFunction" not in capfd.readouterr().err
        away = placeholder.shared_placeholder(
            model[0].weight.shape, torch.float32, torch.device("cpu")
        )
        with pytest.raises(RuntimeError, match=r"Storage that is invalid|not in HBM"):
            away.clone()


def test_a_state_dict_of_another_shape_is_what_scripts_expect() -> None:
    """Many load what fits and go on, or look for torch's words in its error."""
    plain = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    other = {k: v[:2] if k.startswith("1") else v * 0 for k, v in plain.state_dict().items()}
    with tiermem.TierManager("cpu", hbm="1MiB", dram="1MiB") as tier:
        model = tier.wrap(copy.deepcopy(plain))
        for one in (plain, model):
            with pytest.raises(RuntimeError, match=r"size mismatch for 1\.weight"):
                one.load_state_dict(other)
        kept = model.state_dict()
        assert all(torch.equal(kept[name], value) for name, value in plain.state_dict().items())
        assert torch.equal(kept["0.weight"], other["0.weight"])


class Headed(nn.Module):
    """A head on a trunk that other models have, too."""

    def __init__(self, trunk: nn.Module, outputs: int) -> None:
        super().__init__()
        self.trunk = trunk
        self.head = nn.Linear(WIDTH, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.trunk(x))


@pytest.mark.parametrize("hbm", ["1MiB", "40KiB"])
def test_models_that_share_a_trunk_are_wrapped_as_one(hbm: str) -> None:
    trunk = layers()
    pair = nn.ModuleList([Headed(trunk, 4), Headed(trunk, 1)])
    plain = copy.deepcopy(pair)
    optimizers = [torch.optim.AdamW(plain.parameters(), lr=0.01)]
    with tiermem.TierManager("cpu", hbm="1MiB", dram="4MiB") as tier:
        tier.wrap(pair[0])
        with pytest.raises(tiermem.WrapError, match=r"'trunk' is .* as one: tier\.wrap"):
            tier.wrap(pair[1])
        tier.unwrap(pair[0])
    with tiermem.TierManager("cpu", hbm=hbm, dram="4MiB") as tier:
        tier.wrap(pair)
        optimizers.append(tier.optimizer(pair, torch.optim.AdamW, lr=0.01))
        for step in range(6):
            for (actor, critic), optimizer in zip((plain, pair), optimizers, strict=True):
                seed(step)
                x = torch.randn(5, WIDTH)
                (actor(x).square().mean() + critic(x).square().mean()).backward()
                optimizer.step()
                optimizer.zero_grad()
            assert_same(plain.state_dict(), pair.state_dict(), "weights")
