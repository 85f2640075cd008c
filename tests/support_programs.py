"""Programs drawn at random over models drawn at random, to be run plain and with tiermem.

A program is a list of acts with a number each: training in many ways, looking at gradients and
weights, writing them, freezing, hooks, exceptions, saved and loaded states. What an act draws, it
draws from its own number, so that both runs do the same. What they see is kept on the device, and
compared in the end: nothing waits for the device in between that would not in a user's program.
"""

from __future__ import annotations

import copy
import io
import random
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from support_nn import same_bits
from support_stress import Late
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import tiermem

LENGTH = 6
LEAST_SAVED = "4KiB"
DRAM = {"cuda": "8GiB", "cpu": "256MiB"}
Seen = list[torch.Tensor]


class Part(nn.Module):
    """One of several kinds of layer, (batch, length, width) in and out."""

    def __init__(self, kind: str, width: int) -> None:
        super().__init__()
        self.kind = kind
        if kind == "mlp":
            self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)
            self.drop = nn.Dropout(0.1)
        elif kind == "conv":
            self.norm, self.conv = nn.GroupNorm(2, width), nn.Conv1d(width, width, 3, padding=1)
        elif kind == "raw":
            self.weight = nn.Parameter(torch.randn(width, width) / width**0.5)
            self.scale = nn.Parameter(torch.ones(width))
        elif kind == "batchnorm":
            self.norm, self.batch = nn.LayerNorm(width), nn.BatchNorm1d(width)
        elif kind == "gru":
            self.gru = nn.GRU(width, width, batch_first=True)
        else:
            self.attention = nn.MultiheadAttention(width, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the layer's output."""
        if self.kind == "mlp":
            return x + self.drop(self.down(self.up(x).tanh()))
        if self.kind == "conv":
            return x + self.conv(self.norm(x.transpose(1, 2))).transpose(1, 2)
        if self.kind == "raw":
            return x + (x @ self.weight) * self.scale
        if self.kind == "batchnorm":
            return self.batch(self.norm(x).transpose(1, 2)).transpose(1, 2)
        if self.kind == "gru":
            return x + self.gru(x)[0]
        return x + self.attention(x, x, x, need_weights=False)[0]


KINDS = ("mlp", "mlp", "mlp", "conv", "raw", "batchnorm", "gru", "attention")


class Drawn(nn.Module):
    """Layers one after the other.

    Attributes:
        again: Which parts are computed again in backward: ``use_reentrant``, or None.
        skipped: The number of a part that is left out, or None.
        inner: What the second part has given.
    """

    def __init__(self, kinds: list[str], width: int, *, tied: bool) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.parts = nn.ModuleList(Part(kind, width) for kind in kinds)
        self.last = nn.Linear(width, width, bias=False)
        if tied:
            self.last.weight = self.first.weight
        self.again: bool | None = None
        self.skipped: int | None = None
        self.inner: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns (batch, length, width)."""
        x = self.first(x)
        for number, part in enumerate(self.parts):
            if number == self.skipped:
                continue
            if self.again is None:
                x = part(x)
            else:
                x = checkpoint(part, x, use_reentrant=self.again)
            if number == 1:
                self.inner = x
        found: torch.Tensor = self.last(x)
        return found


CLASSES: tuple[tuple[Any, dict[str, Any]], ...] = (
    (torch.optim.AdamW, {"lr": 1e-3}),
    (torch.optim.AdamW, {"lr": 1e-3, "fused": True}),
    (torch.optim.Adam, {"lr": 1e-3, "amsgrad": True, "weight_decay": 0.01}),
    (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9}),
    (torch.optim.SGD, {"lr": 0.01}),
    (torch.optim.RMSprop, {"lr": 1e-3, "momentum": 0.5}),
    (torch.optim.Adagrad, {"lr": 0.01}),
    (torch.optim.NAdam, {"lr": 1e-3}),
)
SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {},
    {},
    {"overlap": False},
    {"overlap": "forward"},
    {"where": "device"},
)
HOMES: tuple[dict[str, Any], ...] = (
    {},
    {},
    {},
    {"activations": "dram"},
    dict.fromkeys(("params", "grads", "optimizer"), "nvme"),
    {"optimizer": "nvme", "activations": "nvme"},
    {"params": "nvme"},
)
Act = tuple[str, int]
"""Its name, and the number it draws from."""


@dataclass(frozen=True)
class Drawing:
    """A model, its optimizer, a budget, and what is done with them.

    Attributes:
        seed: Of the weights.
        width: Of the model.
        kinds: Of its parts.
        tied: Whether the first and the last weight are one.
        dtype: Of the weights.
        cls: The optimizer's class.
        given: Its settings.
        own: tiermem's settings for it.
        share: HBM, of the weights' bytes.
        late: Share of copies that are delayed, on CUDA.
        homes: The policy: where weights, gradients and state are at home, and saved tensors.
        later: Whether the last weight is not the optimizer's from the start.
        acts: What is done.
    """

    seed: int
    width: int
    kinds: list[str]
    tied: bool
    dtype: torch.dtype
    cls: Any
    given: dict[str, Any]
    own: dict[str, Any]
    share: float
    late: float
    homes: dict[str, Any]
    later: bool
    acts: list[Act]

    def build(self) -> Drawn:
        """Returns the model, with the same weights every time."""
        torch.manual_seed(self.seed)
        return Drawn(self.kinds, self.width, tied=self.tied).to(self.dtype)

    def stepped(self, model: nn.Module) -> list[nn.Parameter]:
        """Returns what the optimizer has from the start."""
        params = list(model.parameters())
        return params[:-1] if self.later else params


def drawn(seed: int, width: int) -> Drawing:
    """Returns the program of a seed."""
    rng = random.Random(seed)
    cls, given = rng.choice(CLASSES)
    names, numbers = list(ACTS), []
    some = [rng.choice(names) for _ in range(rng.choice((6, 10, 16)))]
    for name in some:
        numbers.append((name, rng.getrandbits(30)))
        if rng.random() < 0.5:  # habits: what is learned is learned of a loop
            kind = rng.choice(("train", "train", "clipped", "accumulated", "evaluated"))
            numbers += [(kind, rng.getrandbits(30)) for _ in range(rng.choice((2, 4)))]
    return Drawing(
        seed=seed,
        width=width,
        kinds=[rng.choice(KINDS) for _ in range(rng.randint(3, 8))],
        tied=rng.random() < 0.3,
        dtype=rng.choice((torch.float32, torch.float32, torch.bfloat16)),
        cls=cls,
        given=given,
        own=rng.choice(SETTINGS),
        share=rng.choice((0.3, 0.5, 0.8, 1.5, 3.0, 6.0)),
        late=rng.choice((0.0, 0.1, 0.4)),
        homes=rng.choice(HOMES),
        later=rng.random() < 0.2,
        acts=numbers,
    )


class InjectedError(Exception):
    """Raised by hooks of a program."""


def _raise(*_: Any) -> None:
    raise InjectedError


@dataclass
class Program:
    """One run.

    Attributes:
        drawing: What is run.
        model: The model, plain or in the tiers.
        optimizer: Its optimizer.
        device: Where.
        tier: The tiers, or None.
        rng: Of the act under way.
        graphs: Outputs whose backward is still to come.
        kept: Gradients that the program keeps.
        views: Views of weights.
        hooks: Handles.
        saved: A state dict of the model, once there is one.
        steps: A state dict of the optimizer.
        average: An average of the weights.
        scaler: Of gradients.
        schedule: Of the learning rate.
        folder: For checkpoints and files.
        run: What was saved of a plain run.
        is_saved: Whether a run was saved.
    """

    drawing: Drawing
    model: Any
    optimizer: Any
    device: torch.device
    tier: tiermem.TierManager | None
    rng: random.Random = field(default_factory=random.Random)
    graphs: list[torch.Tensor] = field(default_factory=list)
    kept: Seen = field(default_factory=list)
    views: Seen = field(default_factory=list)
    hooks: list[Any] = field(default_factory=list)
    saved: Any = None
    steps: Any = None
    average: Any = None
    scaler: Any = None
    schedule: Any = None
    folder: Path = Path()
    run: Any = None
    is_saved: bool = False

    def data(self, batch: int | None = None) -> torch.Tensor:
        """Returns inputs."""
        shape = batch or self.rng.choice((2, 2, 2, 5)), LENGTH, self.drawing.width
        return torch.randn(shape, device=self.device, dtype=self.drawing.dtype)

    def loss(self, output: torch.Tensor) -> torch.Tensor:
        """Returns a scalar."""
        return output.float().square().mean()

    def delay(self) -> None:
        """Lets the device be late, sometimes."""
        if self.device.type == "cuda" and self.rng.random() < 0.3:
            torch.cuda._sleep(self.rng.choice((100_000, 2_000_000)))

    def weights(self) -> list[nn.Parameter]:
        """Returns the parameters."""
        return list(self.model.parameters())

    def one(self) -> nn.Parameter:
        """Returns one of them."""
        return self.rng.choice(self.weights())

    def part(self) -> Any:
        """Returns one of the layers."""
        return self.rng.choice(list(self.model.parts))

    def backward(self, scale: float = 1.0, batch: int | None = None) -> torch.Tensor:
        """Computes gradients of a new batch; returns the loss."""
        found = self.loss(self.model(self.data(batch))) * scale
        self.delay()
        found.backward()
        return found.detach()

    def step(self) -> None:
        """Steps and clears."""
        self.optimizer.step()
        self.optimizer.zero_grad()


ACTS: dict[str, Callable[[Program], Seen | None]] = {}


def act(does: Callable[[Program], Seen | None]) -> Callable[[Program], Seen | None]:
    """Adds an act."""
    ACTS[does.__name__] = does
    return does


@act
def train(p: Program) -> Seen:
    found = [p.backward(batch=2)]
    p.step()
    return found


@act
def clipped(p: Program) -> Seen:
    loss = p.backward(batch=2)
    norm = nn.utils.clip_grad_norm_(p.model.parameters(), p.rng.choice((1e6, 1e6, 1e6, 1e-3)))
    p.step()
    return [loss, norm]


@act
def accumulated(p: Program) -> Seen:
    found = [p.backward(0.5), p.backward(0.5)]
    p.step()
    return found


@act
def scaled(p: Program) -> Seen:
    if p.drawing.dtype is not torch.float32:
        return []  # torch has no scaler for other gradients
    p.scaler = p.scaler or torch.amp.GradScaler(p.device.type, init_scale=16.0, growth_interval=3)
    with torch.autocast(p.device.type, torch.bfloat16):
        loss = p.loss(p.model(p.data(2)))
    p.scaler.scale(loss).backward()
    if p.rng.random() < 0.7:
        p.scaler.unscale_(p.optimizer)
        nn.utils.clip_grad_norm_(p.model.parameters(), 1e6)
    p.scaler.step(p.optimizer)
    p.scaler.update()
    p.optimizer.zero_grad()
    return [loss.detach()]


@act
def evaluated(p: Program) -> Seen:
    p.model.eval()
    with torch.no_grad() if p.rng.random() < 0.7 else torch.inference_mode():
        found = p.model(p.data()).clone()
    p.model.train()
    return [found]


@act
def forward_only(p: Program) -> Seen:
    p.graphs.append(p.model(p.data()))
    return [p.graphs[-1].detach().clone()]


@act
def backward_later(p: Program) -> None:
    if p.graphs:
        p.loss(p.graphs.pop(p.rng.randrange(len(p.graphs)))).backward()


@act
def backward_twice(p: Program) -> Seen:
    loss = p.loss(p.model(p.data()))
    loss.backward(retain_graph=True)
    p.delay()
    loss.backward()
    return [loss.detach()]


@act
def step_alone(p: Program) -> None:
    p.optimizer.step()


@act
def gradients_alone(p: Program) -> Seen:
    return [p.backward()]


@act
def zeros(p: Program) -> None:
    p.model.zero_grad(set_to_none=p.rng.random() < 0.5)


@act
def look_at_gradients(p: Program) -> Seen:
    return [w.grad.detach().clone() for w in p.weights() if w.grad is not None]


@act
def change_gradient(p: Program) -> None:
    one = p.one()
    if one.grad is None or p.rng.random() < 0.2:
        one.grad = torch.full_like(one, 0.01).detach()
    elif p.rng.random() < 0.3:
        one.grad = None
    else:
        one.grad.mul_(0.5)


@act
def keep_gradient(p: Program) -> None:
    one = p.one()
    if one.grad is not None:
        p.kept.append(one.grad if p.rng.random() < 0.5 else one.grad[:1])


@act
def look_at_kept(p: Program) -> Seen:
    found = [kept.detach().clone() for kept in p.kept]
    if p.rng.random() < 0.5:
        p.kept.clear()
    return found


@act
def norms(p: Program) -> Seen:
    return [w.grad.norm() for w in p.weights() if w.grad is not None]


@act
def look_at_weights(p: Program) -> Seen:
    return [w.detach().clone() for w in p.weights()]


@act
def write_weight(p: Program) -> None:
    one, factor = p.one(), 1 + 0.1 * p.rng.random()
    with torch.no_grad():
        if p.rng.random() < 0.5:
            one.mul_(factor)
        else:
            one.data.mul_(factor)


@act
def write_part(p: Program) -> None:
    with torch.no_grad():
        torch._foreach_mul_(list(p.part().parameters()), 0.98)


@act
def keep_view(p: Program) -> None:
    p.views.append(p.one().detach()[:1])


@act
def look_at_views(p: Program) -> Seen:
    found = [view.clone() for view in p.views]
    p.views.clear()
    return found


@act
def freeze(p: Program) -> None:
    p.part().requires_grad_(False)


@act
def thaw(p: Program) -> None:
    p.model.requires_grad_(True)


@act
def layer_alone(p: Program) -> Seen:
    found = p.part()(p.data())
    if p.rng.random() < 0.5 and found.requires_grad:
        p.loss(found).backward()
    return [found.detach()]


@act
def recompute(p: Program) -> None:
    p.model.again = p.rng.choice((None, False, False, True))


@act
def skip(p: Program) -> None:
    p.model.skipped = p.rng.choice((None, 0, 2))


@act
def rate(p: Program) -> None:
    for group in p.optimizer.param_groups:
        group["lr"] *= p.rng.choice((0.5, 0.9, 1.5))


@act
def scheduled(p: Program) -> Seen:
    if p.schedule is None:
        p.schedule = torch.optim.lr_scheduler.StepLR(p.optimizer, 2, 0.7)
    found = train(p) or []
    p.schedule.step()
    return found


@act
def settings(p: Program) -> None:
    for group in p.optimizer.param_groups:
        if "momentum" in group and p.drawing.cls is torch.optim.SGD:  # others make room beforehand
            group["momentum"] = p.rng.choice((0.0, 0.5, 0.9))
        elif "betas" in group:
            group["betas"] = p.rng.choice(((0.9, 0.999), (0.5, 0.9)))
        if "maximize" in group:
            group["maximize"] = p.rng.random() < 0.2
        if not group.get("fused"):
            group["foreach"] = p.rng.choice((None, True, False))
        group["weight_decay"] = p.rng.choice((0.0, 0.1))


@act
def group_later(p: Program) -> None:
    known = {id(w) for group in p.optimizer.param_groups for w in group["params"]}
    more = [w for w in p.weights() if id(w) not in known]
    if more:
        rest = p.rng.choice(({}, {"lr": 0.002}, {"weight_decay": 0.1, "foreach": False}))
        p.optimizer.add_param_group({"params": more, **rest})


@act
def save(p: Program) -> Seen:
    p.saved = copy.deepcopy(p.model.state_dict())
    return list(p.saved.values())


@act
def load(p: Program) -> None:
    if p.saved is not None:
        p.model.load_state_dict(p.saved)


@act
def save_steps(p: Program) -> Seen:
    p.steps = copy.deepcopy(p.optimizer.state_dict())
    kept = p.steps["state"]
    return [v.detach() for s in kept.values() for v in s.values() if isinstance(v, torch.Tensor)]


@act
def load_steps(p: Program) -> None:
    if p.steps is not None:
        p.optimizer.load_state_dict(copy.deepcopy(p.steps))


@act
def save_run(p: Program) -> None:
    p.is_saved = True
    if p.tier is not None:
        p.tier.save(p.folder / "run", wait=p.rng.random() < 0.5)
        return
    gradients = [None if w.grad is None else w.grad.clone() for w in p.weights()]
    # torch's load_state_dict casts state to the weights' dtype (NAdam's products), a run's does not
    states = [copy.deepcopy(p.optimizer.state.get(w)) for w in p.weights()]
    kept = copy.deepcopy([p.model.state_dict(), p.optimizer.state_dict()])
    p.run = *kept, gradients, states


@act
def load_run(p: Program) -> None:
    if not p.is_saved:
        return
    p.graphs.clear()
    if p.tier is not None:
        p.tier.load(p.folder / "run")
        return
    model, optimizer, gradients, states = p.run
    p.model.load_state_dict(model)
    p.optimizer.load_state_dict(copy.deepcopy(optimizer))
    for weight, gradient, state in zip(p.weights(), gradients, states, strict=True):
        weight.grad = None if gradient is None else gradient.clone()
        if state:
            p.optimizer.state[weight] = copy.deepcopy(state)


@act
def gradients_of(p: Program) -> Seen:
    trained = [w for w in p.weights() if w.requires_grad]
    found = torch.autograd.grad(p.loss(p.model(p.data())), trained, allow_unused=True)
    return [g for g in found if g is not None]


@act
def penalty(p: Program) -> Seen:
    once = {"gru", "attention"} & {part.kind for part in p.model.parts}
    if p.model.again is True or once:
        return []  # torch has no second derivative there
    x = p.data().requires_grad_()
    loss = p.loss(p.model(x))
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    total = loss + p.loss(slope)
    total.backward()
    return [total.detach()]


@act
def another_weight(p: Program) -> Seen:
    weight = torch.full_like(p.model.last.weight, 0.01)
    with torch.no_grad():
        return [functional_call(p.model, {"last.weight": weight}, (p.data(),))]


@act
def hook_output(p: Program) -> None:
    p.hooks.append(p.part().register_forward_hook(lambda _m, _x, out: out * 1.1))


@act
def hook_gradient(p: Program) -> None:
    one = p.one()
    if one.requires_grad:
        p.hooks.append(one.register_hook(lambda gradient: gradient * 0.9))


def _halve(weight: torch.Tensor) -> None:
    if weight.grad is not None:
        weight.grad.mul_(0.5)


@act
def hook_accumulated(p: Program) -> None:
    one = p.one()
    if one.requires_grad:
        p.hooks.append(one.register_post_accumulate_grad_hook(_halve))


@act
def unhook(p: Program) -> None:
    while p.hooks:
        p.hooks.pop().remove()


@act
def fail_forward(p: Program) -> None:
    handle = p.part().register_forward_hook(_raise)
    try:
        p.model(p.data())
    except InjectedError:
        pass
    finally:
        handle.remove()


@act
def fail_backward(p: Program) -> None:
    output = p.model(p.data())
    if p.model.inner is not None and p.model.inner.requires_grad:
        p.model.inner.register_hook(_raise)
        try:
            p.loss(output).backward()
        except InjectedError:
            p.optimizer.zero_grad()


@act
def out_of_memory(p: Program) -> Seen:
    """Is told so half way, and repeats the step with less."""

    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("out of memory")

    def full_later(_module: Any, _x: Any, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(full)

    handle = p.part().register_forward_hook(p.rng.choice((full, full_later)))
    try:
        p.backward(batch=2)
    except torch.OutOfMemoryError:
        pass
    finally:
        handle.remove()
    if p.rng.random() < 0.7:
        p.optimizer.zero_grad()
    found = [p.backward(batch=1)]
    p.step()
    return found


@act
def copied_model(p: Program) -> Seen:
    p.model.inner = None
    other = copy.deepcopy(p.model)
    found = [w.detach() for w in other.parameters()]
    return found + [w.grad for w in other.parameters() if w.grad is not None]


@act
def pickled(p: Program) -> Seen:
    if p.hooks:
        return []  # they are functions of functions, which pickle does not know
    file = io.BytesIO()
    p.model.inner = None
    torch.save(p.model, file)
    file.seek(0)
    return [w.detach() for w in torch.load(file, weights_only=False).parameters()]


@act
def anomaly(p: Program) -> Seen | None:
    with torch.autograd.set_detect_anomaly(True):
        return train(p)


@act
def sharpness(p: Program) -> Seen:
    """Steps with gradients at weights a little further on."""
    state = torch.random.get_rng_state()
    found, changes = [p.backward(batch=2)], []
    with torch.no_grad():
        for weight in p.weights():
            if weight.grad is not None:
                changes.append((weight, weight.grad * 0.01))
                weight.add_(changes[-1][1])
    p.optimizer.zero_grad()
    torch.random.set_rng_state(state)
    found.append(p.backward(batch=2))
    with torch.no_grad():
        for weight, change in changes:
            weight.sub_(change)
    p.step()
    return found


@act
def closed_over(p: Program) -> Seen:
    def loss() -> torch.Tensor:
        p.optimizer.zero_grad()
        return p.backward(batch=2)

    return [p.optimizer.step(loss)]


@act
def some_inputs(p: Program) -> Seen:
    some = [w for w in p.weights() if w.requires_grad and p.rng.random() < 0.5]
    loss = p.loss(p.model(p.data()))
    if some and p.model.again is not True:  # which takes no inputs
        loss.backward(inputs=some)
    return [loss.detach()]


@act
def evaluated_between(p: Program) -> Seen:
    loss = p.loss(p.model(p.data(2)))
    found = [*(evaluated(p) or []), loss.detach()]
    loss.backward()
    found += evaluated(p) or []
    p.optimizer.step()
    found += evaluated(p) or []
    p.optimizer.zero_grad(set_to_none=p.rng.random() < 0.5)
    return found


@act
def clip_values(p: Program) -> Seen:
    found = [p.backward(batch=2)]
    nn.utils.clip_grad_value_(p.model.parameters(), 1e-3)
    p.step()
    return found


@act
def write_state(p: Program) -> Seen:
    kept = p.optimizer.state.get(p.one()) or {}
    found = [value for value in kept.values() if isinstance(value, torch.Tensor) and value.dim()]
    for value in found:
        value.mul_(0.9)
    return [value.clone() for value in found]


@act
def other_weights(p: Program) -> Seen:
    """Evaluates with other weights, and puts the own ones back."""
    own = [w.detach().clone() for w in p.weights()]
    for weight in p.weights():
        weight.data = weight.detach() * 0.5
    found = evaluated(p) or []
    for weight, value in zip(p.weights(), own, strict=True):
        weight.data = value
    return found


@act
def hook_module(p: Program) -> None:
    def scale(_module: Any, slopes: Any, _outer: Any) -> Any:
        return tuple(None if slope is None else slope * 0.9 for slope in slopes)

    if p.model.again is not True:
        p.hooks.append(p.part().register_full_backward_hook(scale))


@act
def hook_steps(p: Program) -> None:
    def before(optimizer: Any, *_: Any) -> None:
        for group in optimizer.param_groups:
            for weight in group["params"][::3]:
                if weight.grad is not None:
                    weight.grad.mul_(0.5)

    def after(optimizer: Any, *_: Any) -> None:
        with torch.no_grad():
            for group in optimizer.param_groups:
                for weight in group["params"][::4]:
                    weight.mul_(0.999)

    if p.rng.random() < 0.5:
        p.hooks.append(p.optimizer.register_step_pre_hook(before))
    else:
        p.hooks.append(p.optimizer.register_step_post_hook(after))


@act
def in_a_thread(p: Program) -> Seen:
    found: Seen = []
    x = p.data()

    def call() -> None:
        with torch.no_grad():
            found.append(p.model(x))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    return found


@act
def on_a_stream(p: Program) -> Seen:
    x = p.data()
    if p.device.type != "cuda":
        with torch.no_grad():
            return [p.model(x)]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.no_grad():
        p.delay()
        found = p.model(x)
    torch.cuda.current_stream().wait_stream(stream)
    found.record_stream(torch.cuda.current_stream())
    x.record_stream(stream)
    return [found]


@act
def averaged(p: Program) -> Seen:
    if p.average is None:
        p.average = p.drawing.build().to(p.device).requires_grad_(False)
    with torch.no_grad():
        for mine, own in zip(p.average.parameters(), p.model.parameters(), strict=True):
            mine.lerp_(own, 0.1)
    return [next(p.average.parameters()).clone()]


@act
def materialized(p: Program) -> None:
    with nullcontext() if p.tier is None else p.tier.materialize(p.model), torch.no_grad():
        p.one().mul_(0.99)


def run(
    drawing: Drawing, device: torch.device, tier: tiermem.TierManager | None, folder: Path
) -> list[Any]:
    """Runs a program; returns what it has seen, act by act: tensors, or the error's class."""
    torch.manual_seed(drawing.seed)
    model, settings = drawing.build(), dict(drawing.given)
    if tier is None:
        model.to(device)
        optimizer = drawing.cls(drawing.stepped(model), **settings)
    else:
        tier.wrap(model)
        stepped = drawing.stepped(model)
        optimizer = tier.optimizer(stepped, drawing.cls, **settings, **drawing.own)
    program = Program(drawing, model, optimizer, device, tier, folder=folder)
    seen: list[Any] = []
    for name, number in [*drawing.acts, ("thaw", 0), ("train", 1), ("look_at_weights", 2)]:
        program.rng = random.Random(number)
        torch.manual_seed(number)
        try:
            seen.append(ACTS[name](program) or [])
        except tiermem.TierError as error:
            seen.append(f"{type(error).__name__}: {error}")
            break
        except RuntimeError as error:
            seen.append(f"RuntimeError: {error}")
            break  # a backward cut short leaves what torch does not promise
    program.graphs.clear()
    return seen


def tried(drawing: Drawing, device: torch.device, dram: float | None = None) -> str:
    """Runs a program both ways; returns ``"same"``, why it was refused, or what differs.

    Args:
        drawing: The program.
        device: Where.
        dram: Its budget, of the weights' bytes, so that what does not fit goes to files; None for
            more than enough.
    """
    with TemporaryDirectory() as name:
        folder = Path(name)
        plain = run(drawing, device, None, folder)
        nbytes = sum(p.nbytes for p in drawing.build().parameters())
        budgets: dict[str, Any] = {"dram": DRAM[device.type], "policy": drawing.homes}
        if "nvme" in drawing.homes.values() or dram is not None:
            budgets["nvme"] = folder
        share = drawing.share
        while True:
            budgets["hbm"] = int(nbytes * share) // 4096 * 4096
            if dram is not None:
                budgets["dram"] = int(nbytes * dram) // 4096 * 4096 + (64 << 10)
            with tiermem.TierManager(device, activation_min=LEAST_SAVED, **budgets) as tier:
                late = Late(drawing.seed, drawing.late, device.type)
                late.copies(tier._manager.parts.copy)
                try:
                    mine = run(drawing, device, tier, folder)
                except tiermem.CapacityError as error:  # refused at the start
                    mine = [f"CapacityError: {error}"]
                tier.close(discard=True)
            if not str(mine[-1]).startswith("CapacityError"):
                return compared(drawing, plain, mine)
            share *= 1.5
            dram = dram and dram * 1.5


def compared(drawing: Drawing, plain: list[Any], mine: list[Any]) -> str:
    """Returns whether both have seen the same."""
    for number, (a, b) in enumerate(zip(plain, mine, strict=False)):
        act = drawing.acts[number][0] if number < len(drawing.acts) else "end"
        if isinstance(b, str):
            what = "same, with an error" if isinstance(a, str) else "refused"
            return f"{what} at {act} ({number}): {b}"
        if isinstance(a, str):
            return f"not refused at {act} ({number}): {a}"
        if len(a) != len(b):
            return f"differs at {act} ({number}): {len(a)} tensors, {len(b)}"
        for one, other in zip(a, b, strict=True):
            if not same_bits(one, other.to(one.device)):
                return f"differs at {act} ({number}): shape {tuple(one.shape)}"
    return "same"
