"""What errors ask for: enough for the whole program, at once; inference needs no gradients."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support_nn import assert_same, seed
from torch import nn

import tiermem
from tiermem.cli import main
from tiermem.core.need import Played, StepNeed, least

_ASKED = re.compile(r"\b(hbm|dram|nvme_bytes)= at least [^()]*\((\d+) bytes\)")
_WIDE = re.compile(
    r"With amsgrad=True, .* and overlap='forward' or 'backward', that is ([^()].*?\))\."
)
_ALONE = re.compile(r"Forward alone, .* would do with (.*?\))(\.|$)")
_LISTED = re.compile(r"\b(hbm|dram|nvme_bytes)=[\d.]+ \w+ \((\d+) bytes\)")


def build() -> nn.Module:
    seed(4)
    return nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)])


def data() -> torch.Tensor:
    seed(5)
    return torch.randn(3, 64)


def named(error: BaseException) -> dict[str, int]:
    """Returns every budget that an error asks for."""
    found = {name: int(nbytes) for name, nbytes in _ASKED.findall(str(error))}
    assert found, f"no budget in: {error}"
    return found


def alone(error: BaseException, form: re.Pattern[str] = _ALONE) -> dict[str, int]:
    """Returns what it says of forward alone, or of something else."""
    match = form.search(str(error))
    assert match is not None, f"nothing of that in: {error}"
    return {name: int(nbytes) for name, nbytes in _LISTED.findall(match[1])}


@pytest.fixture
def tiers() -> Iterator[Callable[..., tiermem.TierManager]]:
    opened = []

    def make(**options: Any) -> tiermem.TierManager:
        opened.append(tiermem.TierManager("cpu", **{"hbm": 4096, "dram": "1MiB", **options}))
        return opened[-1]

    yield make
    for tier in opened:
        tier.close(discard=True)


def refused(act: Callable[[], Any]) -> tiermem.CapacityError:
    with pytest.raises(tiermem.CapacityError) as caught:
        act()
    return caught.value


def test_what_is_said_of_a_model_is_short_sentences_with_sizes_as_budgets_have_them(
    tiers: Any,
) -> None:
    said = str(refused(lambda: tiers(dram=4096).wrap(build())))
    first, train, more, forward, whole = said.split(". ")
    assert first.endswith("4.00 KiB of 4.00 KiB are free")
    assert train == (
        "To train the model with AdamW, give hbm= at least 56.00 KiB (57344 bytes) and dram= at "
        "least 304.00 KiB (311296 bytes), or give nvme=folder for what does not fit"
    )
    assert "amsgrad=True" in more and "overlap='forward' or 'backward'" in more
    assert "torch.no_grad()" in forward and "'0.0.weight' (16.00 KiB)" in whole
    assert not re.search(r"\d{4}", re.sub(r"\(\d+ bytes\)", "", said))


# -- at the first try --------------------------------------------------------


@pytest.mark.parametrize("policy", ["dram", "nvme", "auto", {"params": "hbm"}, "hbm"], ids=str)
def test_one_retry_does(tiers: Any, tmp_path: Path, policy: Any) -> None:
    """All budgets at once, for forward, backward and step."""
    options = {"policy": policy, "nvme": tmp_path, "dram": 600 << 10, "nvme_bytes": 4096}
    first = tiers(**options)
    error = refused(lambda: first.wrap(build()))
    again = tiers(**{**options, **named(error)})
    model, plain = again.wrap(build()), build()
    optimizer = again.optimizer(model, torch.optim.AdamW)
    plain_optimizer = torch.optim.AdamW(plain.parameters())
    for _ in range(2):
        for one, stepper in ((model, optimizer), (plain, plain_optimizer)):
            one(data()).square().mean().backward()
            stepper.step()
            stepper.zero_grad()
    assert_same(dict(plain.state_dict()), dict(model.state_dict()), "state")


def test_an_optimizer_that_needs_more_says_all_of_it(tiers: Any) -> None:
    """Masters, a larger state: they are not known at wrap; the next error has everything."""
    settings = {"master_dtype": torch.float32, "grad_dtype": torch.float32, "amsgrad": True}
    budgets = named(refused(lambda: tiers(dram=4096).wrap(build().bfloat16())))
    tier = tiers(**budgets)
    model = tier.wrap(build().bfloat16())
    error = refused(lambda: tier.optimizer(model, torch.optim.AdamW, **settings))
    assert {"hbm", "dram"} == named(error).keys()
    tier = tiers(**named(error))
    model = tier.wrap(build().bfloat16())
    optimizer = tier.optimizer(model, torch.optim.AdamW, **settings)
    model(data().bfloat16()).float().square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize(
    "settings",
    [
        {"amsgrad": True},
        {"amsgrad": True, "overlap": "forward"},
        {"master_dtype": torch.float32, "overlap": "backward"},
        {"master_dtype": torch.float32, "grad_dtype": torch.float32, "amsgrad": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("policy", ["dram", {"params": "hbm"}], ids=str)
def test_the_first_error_says_what_a_larger_optimizer_takes(
    tiers: Any, policy: Any, settings: dict[str, Any]
) -> None:
    error = refused(lambda: tiers(dram=4096, policy=policy).wrap(build().bfloat16()))
    budgets = alone(error, _WIDE)
    assert all(budgets[name] > nbytes for name, nbytes in named(error).items())
    tier = tiers(policy=policy, **budgets)
    model = tier.wrap(build().bfloat16())
    optimizer = tier.optimizer(model, torch.optim.AdamW, **settings)
    for _ in range(3):
        model(data().bfloat16()).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_too_little_dram_for_files_says_that_homes_come_on_top(tiers: Any, tmp_path: Path) -> None:
    error = refused(lambda: tiers(dram=4096, nvme=tmp_path))
    assert "policy= puts into DRAM comes on top" in str(error)
    assert "tier.wrap(model) says how much" in str(error)
    asked = named(error)
    tier = tiers(hbm="1MiB", nvme=tmp_path, policy="dram", **asked)
    more = named(refused(lambda: tier.wrap(build())))
    assert more["dram"] > asked["dram"]
    tiers(hbm="1MiB", nvme=tmp_path, policy="dram", **more).wrap(build())
    tiers(hbm="1MiB", nvme=tmp_path, policy="nvme", **asked).wrap(build())


def test_homes_of_single_modules_count(tiers: Any) -> None:
    homes = {"0": "hbm", "2.0": "hbm"}
    asked = named(refused(lambda: tiers(dram=4096).wrap(build(), homes=homes)))
    assert asked["hbm"] > named(refused(lambda: tiers(dram=4096).wrap(build())))["hbm"]
    tier = tiers(**asked)
    model = tier.wrap(build(), homes=homes)
    optimizer = tier.optimizer(model, torch.optim.AdamW)
    model(data()).square().mean().backward()
    optimizer.step()


def test_a_second_model_counts_the_first(tiers: Any) -> None:
    tier = tiers(hbm=1 << 20, dram=100 << 10)
    tier.wrap(build())
    both = named(refused(lambda: tier.wrap(build())))
    tier = tiers(hbm=1 << 20, **both)
    models = [tier.wrap(build()), tier.wrap(build())]
    for model in models:
        optimizer = tier.optimizer(model, torch.optim.AdamW)
        model(data()).square().mean().backward()
        optimizer.step()


def test_a_model_that_was_refused_or_taken_out_counts_no_more(tiers: Any) -> None:
    tier = tiers()
    first = named(refused(lambda: tier.wrap(build())))
    assert named(refused(lambda: tier.wrap(build()))) == first
    tier = tiers(hbm=first["hbm"], dram="1MiB")
    tier.unwrap(tier.wrap(build()))
    large = nn.Sequential(*[nn.Linear(256, 256) for _ in range(2)])
    asked = named(refused(lambda: tier.wrap(large)))
    assert asked == named(refused(lambda: tiers(hbm=first["hbm"], dram="1MiB").wrap(large)))


def test_what_calls_of_a_model_that_was_taken_out_held_counts_no_more(tiers: Any) -> None:
    tier = tiers(hbm=160 << 10, policy={"params": "dram", "grads": "dram", "optimizer": "hbm"})
    tier.unwrap(tier.wrap(nn.Linear(180, 180)))  # 127 KiB of the 160
    model = tier.wrap(build())
    optimizer = tier.optimizer(model, torch.optim.SGD, momentum=0.9, overlap="forward")
    model(data()).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
def test_weights_that_are_stepped_as_a_whole_are_counted_as_a_whole(
    tiers: Any, form: torch.memory_format
) -> None:
    """What is not in the order of its elements is not stepped in parts, though it is large."""

    def build_convs() -> nn.Module:
        seed(4)
        layers = [nn.Conv2d(32, 32, 3, padding=1) for _ in range(3)]
        return nn.Sequential(*layers).to(memory_format=form)  # type: ignore[call-overload]

    tier = tiers(**named(refused(lambda: tiers().wrap(build_convs()))))
    model = tier.wrap(build_convs())
    optimizer = tier.optimizer(model, torch.optim.AdamW, lr=1e-3)
    for _ in range(2):
        model(torch.randn(2, 32, 4, 4).to(memory_format=form)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_what_is_asked_for_is_not_too_much(tiers: Any) -> None:
    """A page less is refused, of each budget."""
    asked = named(refused(lambda: tiers(dram=4096, policy="dram").wrap(build())))

    def run(**budgets: int) -> None:
        tier = tiers(policy="dram", **budgets)
        model = tier.wrap(build())
        optimizer = tier.optimizer(model, torch.optim.AdamW)
        model(data()).square().mean().backward()
        optimizer.step()

    run(**asked)
    for name in asked:
        refused(lambda: run(**{**asked, name: asked[name] - 4096}))  # noqa: B023


# -- inference ---------------------------------------------------------------


@pytest.mark.parametrize("how", ["no_grad", "inference_mode", "frozen", "other gradients"])
def test_inference_needs_no_room_for_gradients(tiers: Any, tmp_path: Path, how: str) -> None:
    """With the budgets that forward alone takes, of HBM and of DRAM."""
    model = build().requires_grad_(how != "frozen")
    first = refused(lambda: tiers(dram=4096, policy="dram").wrap(model))
    budgets = named(first) if how == "frozen" else alone(first)
    assert budgets["dram"] == 4 * 20480 and budgets["hbm"] == 20480
    tier, plain = tiers(policy="dram", **budgets), build()
    tier.wrap(model)
    if how == "other gradients":
        results = []
        for one in (plain, model):
            x = data().requires_grad_()
            results.append(torch.autograd.grad(one(x).square().sum(), x)[0])
        assert_same(*results, "gradient of the input")
        return
    context = torch.inference_mode if how == "inference_mode" else torch.no_grad
    if how == "frozen":
        assert_same(plain(data()).detach(), model(data()), "with gradients enabled")
    with context():
        for _ in range(2):
            assert_same(plain(data()), model.eval()(data()), "output")


def test_gradients_without_room_are_refused_before_anything_is_kept(tiers: Any) -> None:
    budgets = alone(refused(lambda: tiers(dram=4096, policy="dram").wrap(build())))
    tier = tiers(policy="dram", **budgets)
    model = tier.wrap(build())
    error = refused(lambda: model(data()).square().mean().backward())
    for said in ("no_grad()", "requires_grad_(False)", "gradients"):
        assert said in str(error)
    assert all(p.grad is None for p in model.parameters())
    assert not tier._manager.parts.homes.dram.capacity - tier._manager.parts.homes.dram.used
    assert_same(build()(data()).detach(), model(data()).detach(), "output")
    model.requires_grad_(False)
    model(data().requires_grad_()).sum().backward()
    again = tiers(policy="dram", **named(error))
    model, plain = again.wrap(build()), build()
    for one in (model, plain):
        one(data()).square().mean().backward()
    assert_same(plain[0][0].weight.grad, model[0][0].weight.grad.clone(), "gradient")


def _took_out(model: Any) -> None:
    del model[1]


def _put_before(model: Any) -> None:
    model.insert(0, nn.Linear(64, 64))


def _renamed(model: Any) -> None:
    model.add_module("last", model._modules.pop("2"))


@pytest.mark.parametrize("edit", [_took_out, _put_before, _renamed])
@pytest.mark.parametrize(
    "options",
    [{}, {"blocks": ["0", "1", "2", "3"]}, {"homes": {"2": "dram"}}],
    ids=["auto", "blocks", "homes"],
)
def test_errors_say_what_would_do_when_modules_have_come_or_gone(
    tiers: Any, edit: Callable[[Any], None], options: dict[str, Any]
) -> None:
    """A module's name is no longer one of the model, or that of another module."""
    hbm = 24 << 10
    for _ in range(3):
        model = build()
        tier = tiers(hbm=hbm, dram="4MiB")
        tier.wrap(model, **options)
        edit(model)
        try:
            model(data()).sum().backward()
            tier.optimizer(list(model[-1].parameters()), torch.optim.AdamW)
            break
        except tiermem.CapacityError as error:
            assert named(error)["hbm"] > hbm
            hbm = named(error)["hbm"]
    else:
        pytest.fail(f"never enough, now {hbm}")
    assert hbm > 24 << 10


def test_a_call_that_takes_gradients_of_what_is_read_in_dram_says_what_backward_takes(
    tiers: Any,
) -> None:
    """Not what the call alone takes: gradients need room in both tiers."""

    def evaluated() -> nn.Module:
        seed(4)
        layers = nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 8)
        return nn.Sequential(*layers).eval()

    seed(5)
    x, plain = torch.randn(3, 32), evaluated()
    weights = sum(param.nbytes for param in plain.parameters())
    tight = {"hbm": "28KiB", "dram": weights + (4 << 12)}
    model = tiers(**tight).wrap(evaluated())
    error = refused(lambda: model(x))
    assert "is read in tier dram" in str(error) and "torch.no_grad()" in str(error)
    assert named(error).keys() == {"hbm", "dram"}
    model = tiers(**{**tight, **named(error)}).wrap(evaluated())
    for one in (model, plain):
        one(x).square().mean().backward()
    for param, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert_same(other.grad, param.grad, "gradients")


def test_what_is_thawed_is_refused_in_backward_where_a_step_has_no_room_beside_it(
    tiers: Any,
) -> None:
    """Not in the middle of a step; and gradients of what is frozen meanwhile keep their room."""

    def built() -> nn.Module:
        seed(4)
        layers = [nn.Sequential(nn.Linear(64, 192), nn.Linear(192, 64)) for _ in range(2)]
        model = nn.Sequential(*layers).bfloat16()
        model[0].requires_grad_(False)
        return model

    def run(model: Any, make: Callable[..., Any], done: list[str]) -> None:
        wanted = [param for param in model.parameters() if param.requires_grad]
        optimizer = make(wanted, torch.optim.SGD, lr=0.01, momentum=0.9)
        for number in range(3):
            if number == 1:
                model[0][0].requires_grad_(True)
                model[1][1].requires_grad_(False)
            seed(number)
            model(torch.randn(2, 64).bfloat16()).float().square().mean().backward()
            done.append("backward")
            optimizer.step()
            done.append("step")
            optimizer.zero_grad()

    plain, settings = built(), {"dram": "16MiB", "policy": {"grads": "hbm"}}
    run(plain, lambda params, cls, **own: cls(params, **own), [])
    first = tiers(hbm="38KiB", **settings)
    model = first.wrap(built())
    least = named(refused(lambda: run(model, first.optimizer, [])))
    second, done = tiers(**{**settings, **least}), list[str]()
    model = second.wrap(built())
    error = refused(lambda: run(model, second.optimizer, done))
    assert done == ["backward", "step"]
    third = tiers(**{**settings, **named(error)})
    model = third.wrap(built())
    run(model, third.optimizer, [])
    assert_same(dict(plain.state_dict()), dict(model.state_dict()), "weights")


def test_a_plain_optimizer_that_wants_everything_at_once(tiers: Any) -> None:
    tier = tiers(hbm=90 << 10, dram="2MiB")
    model = tier.wrap(build())
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(data()).square().mean().backward()
    error = refused(optimizer.step)
    assert "tier.optimizer(model, torch.optim.AdamW" in str(error)


def test_an_optimizer_that_sends_weights_to_other_processes_is_not_advised(tiers: Any) -> None:
    """``tier.optimizer`` refuses it as well."""

    class Averaging(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            torch.cat([param.data.reshape(-1) for param in self.param_groups[0]["params"]])

    Averaging.__module__ = "torch.distributed.optim"  # as PostLocalSGDOptimizer is
    model = tiers(hbm="48KiB").wrap(build())
    optimizer = Averaging(model.parameters(), lr=0.1)
    error = refused(optimizer.step)
    assert "tier.optimizer(model, ...) of the class that is inside it" in str(error)


def test_the_command_line_names_its_own_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["--device", "cpu", "--layers", "1", "--width", "32", "--heads", "2", "--steps", "1"]
    options = [
        "--hbm",
        "4KiB",
        "--dram",
        "4MiB",
        "--nvme",
        str(tmp_path),
        "--out",
        str(tmp_path),
        "--no-compare",
    ]
    assert main(["train", *small, *options]) == 2
    said = capsys.readouterr().err
    assert re.search(r"give --hbm at least \d[^()]* \(\d+ bytes\)", said) and "hbm=" not in said


def test_all_weights_at_once_as_an_average_wants_them(
    tiers: Callable[..., tiermem.TierManager],
) -> None:
    """The least budget for one block more is said, and the one for all of them."""
    model = build()
    tier = tiers(hbm="48KiB")
    tier.wrap(model)
    with pytest.raises(tiermem.CapacityError) as caught:
        [param.detach() for param in model.parameters()]
    match = re.search(r", or [^()]*\((\d+) bytes\) for all weights at once", str(caught.value))
    assert match is not None, caught.value
    tier.unwrap(model)
    del caught
    other = tiers(hbm=int(match[1]))
    other.wrap(model)
    assert len([param.detach() for param in model.parameters()]) == 8


class Around(nn.Module):
    """Calls a module while it holds a weight of its own."""

    def __init__(self, inner: nn.Module, rows: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(rows, 64))
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + self.weight.mean(0)


def test_shared_module_is_counted_at_its_other_place(
    tiers: Callable[..., tiermem.TierManager],
) -> None:
    """The second of two modules that share one holds more meanwhile; the first shares its block."""
    seed(4)
    shared = nn.Linear(64, 64, bias=False)
    model = nn.Sequential(Around(shared, 16), Around(shared, 128))
    x = data()
    want = model(x).detach()
    with pytest.raises(tiermem.CapacityError) as caught:
        tiers(hbm="16KiB").wrap(model)
    least = alone(caught.value)
    assert least == {"hbm": 4 * 64 * (16 + 64 + 128)}
    tier = tiers(**least)
    tier.wrap(model)
    with torch.no_grad():
        assert torch.equal(model(x), want)


def test_a_budget_is_named_though_modules_have_come_twice_since(
    tiers: Callable[..., tiermem.TierManager],
) -> None:
    """Places are those that the model had as it was wrapped."""
    model = build()
    tier = tiers(hbm="36KiB")
    tier.wrap(model)
    extra = nn.Tanh()
    model.add_module("one", nn.Sequential(extra))
    model.add_module("other", nn.Sequential(extra))
    with pytest.raises(tiermem.CapacityError) as caught:
        tier.optimizer(model, torch.optim.AdamW)
    assert named(caught.value)["hbm"] > 36 << 10


class Four(torch.optim.Optimizer):
    """Keeps four times the bytes of the weights."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                kept = self.state[param]
                for name in "abcd":
                    kept.setdefault(name, torch.zeros_like(param)).mul_(0.9).add_(param.grad)
                param.sub_(kept["a"], alpha=0.1)


def test_a_step_after_calls_that_had_all_weights_in_hbm_moves_them_together(tiers: Any) -> None:
    """None of those calls has left a graph, so weights in use can be moved for what is beside."""

    def train(tier: Any) -> None:
        seed(3)
        sizes = [(32, 64), (64, 64), (64, 64), (64, 8)]
        model = tier.wrap(nn.Sequential(*[nn.Linear(*size) for size in sizes]).eval())
        with torch.no_grad():
            for _ in range(3):
                model(torch.randn(3, 32))
        optimizer = tier.optimizer(model.train(), Four)
        for _ in range(2):
            model(torch.randn(3, 32)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    asked = named(refused(lambda: train(tiers(hbm=40000))))
    train(tiers(**asked))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.qkv = nn.Linear(64, 768, bias=False)
        self.out = nn.Linear(256, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        return x + self.out(nn.functional.scaled_dot_product_attention(q, k, v))


class Tokens(nn.Module):
    """Has a view of a weight of its own while layers inside are called, and these call others."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Parameter(torch.randn(4, 64))
        self.layers = nn.Sequential(
            nn.Linear(64, 64),
            *[m for _ in range(3) for m in (Attention(), nn.Linear(64, 128), nn.Linear(128, 64))],
            nn.Linear(64, 10),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.tokens.expand(len(x), 4, 64)
        return self.layers(torch.cat((tokens, x), 1))[:, : tokens.shape[1]]


def test_views_of_what_is_around_do_not_part_what_is_free(tiers: Any) -> None:
    """They keep a block where it is, so it lies at an end of a small HBM."""

    def train(tier: Any) -> None:
        seed(3)
        model = tier.wrap(Tokens().eval())
        with torch.no_grad():
            model(torch.randn(2, 5, 64))
        optimizer = tier.optimizer(model.train(), torch.optim.AdamW)
        for _ in range(4):
            model(torch.randn(2, 5, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    asked = named(refused(lambda: train(tiers(hbm=8192, dram="8MiB"))))
    train(tiers(**asked, dram="8MiB"))


# -- the arithmetic ----------------------------------------------------------


def test_played() -> None:
    played = Played(
        [("dram", 10), ("hbm", 5), ("auto", 20), ("nvme", 7), ("auto", 3)],
        chain=12,
        gradients=4,
        steps=[StepNeed(15, 6), StepNeed(14, 6, overlap=True)],
    )
    assert played.hbm() == 5 + 14 + (12 - 6)
    assert played.short_of_dram(10, files=True) == 0
    assert played.on_disk(13) == 7 + 20
    assert played.on_disk(33) == 7
    assert played.short_of_dram(30, files=False) == 3
    assert played.short_of_dram(9, files=True) == 1


@pytest.mark.parametrize(
    ("need", "budget", "found"),
    [
        (lambda _: 40960, 4096, 40960),
        (lambda _: 40960, 81920, 81920),
        (lambda b: 20480 + b // 8192 * 4096, 4096, 36864),  # the larger, the more
        (lambda b: 40960 if b < 20480 else 20480, 4096, 20480),  # the larger, the less
    ],
)
def test_the_least_budget(need: Callable[[int], int], budget: int, found: int) -> None:
    assert least(need, budget) == found


def test_a_budget_of_less_than_a_page_is_called_that() -> None:
    """And not 0 B, which nobody gave."""
    with tiermem.TierManager("cpu", hbm="1KiB", dram="1MiB") as tier:
        with pytest.raises(tiermem.CapacityError, match=r"a budget of less than a page .4\.00 KiB"):
            tier.wrap(torch.nn.Linear(64, 64))
