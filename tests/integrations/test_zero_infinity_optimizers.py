"""DeepSpeed's optimizers: which class each becomes, with which settings, and its numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from support_zero_infinity import build, config, plain, started, train

import tiermem
import tiermem.integrations.zero_infinity as deepspeed
from tiermem.integrations.zero_infinity.optimizers import Adam, FusedLamb, FusedLion, from_config

CPU = "cpu"


@pytest.mark.parametrize(
    ("kind", "params", "cls", "settings"),
    [
        ("Adam", {}, torch.optim.AdamW, {"weight_decay": 0.0}),
        ("Adam", {"adam_w_mode": False}, torch.optim.Adam, {"weight_decay": 0.0}),
        ("AdamW", {"adam_w_mode": False}, torch.optim.AdamW, {"weight_decay": 0.0}),
        ("adamw", {"weight_decay": 0.1}, torch.optim.AdamW, {"weight_decay": 0.1}),
        ("AdamW", {"torch_adam": True}, torch.optim.AdamW, {}),
        ("Adam", {"torch_adam": True, "adam_w_mode": False}, torch.optim.Adam, {}),
        ("AdamW", {"betas": [0.9, 0.95]}, torch.optim.AdamW,
         {"betas": (0.9, 0.95), "weight_decay": 0.0}),
        ("Adam", {"bias_correction": False}, Adam,
         {"bias_correction": False, "adam_w_mode": True}),
        ("OneBitAdam", {"freeze_step": 100, "cuda_aware": False}, torch.optim.AdamW,
         {"weight_decay": 0.0}),
        ("SGD", {"lr": 0.1, "momentum": 0.9}, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        ("sgd", {"lr": 0.1}, torch.optim.SGD, {"lr": 0.1}),
        ("Adagrad", {}, torch.optim.Adagrad, {}),
        ("RMSprop", {"alpha": 0.9}, torch.optim.RMSprop, {"alpha": 0.9}),
        ("Lamb", {"max_coeff": 5, "max_grad_norm": 1}, FusedLamb, {"max_coeff": 5}),
        ("OneBitLamb", {"coeff_beta": 0.9}, FusedLamb, {}),
        ("Lion", {"betas": [0.9, 0.99]}, FusedLion, {"betas": (0.9, 0.99)}),
    ],
)  # fmt: skip
def test_classes_and_settings(kind: str, params: Any, cls: Any, settings: Any) -> None:
    assert from_config("a file", kind, params, CPU) == (cls, settings)


def test_adam_is_fused_on_the_device_unless_torchs_own_is_asked_for() -> None:
    assert from_config("a file", "Adam", {}, "cuda")[1]["fused"] is True
    assert "fused" not in from_config("a file", "Adam", {"torch_adam": True}, "cuda")[1]
    assert from_config("a file", "Adam", {"fused": False}, "cuda:1")[1]["fused"] is False


@pytest.mark.parametrize(
    ("kind", "params", "says"),
    [
        ("Adamm", {}, "optimizer.type='Adamm' is not known here: write Adam"),
        ("Optimizer", {}, "is not known here"),
        (
            "AdamW",
            {"learning_rate": 1},
            "params.learning_rate=1: AdamW has no such setting",
        ),
        ("SGD", {"eps": 1}, "params.eps=1: SGD has no such setting"),
        ("AdamW", {"lr": "fast"}, r"optimizer.params=.*AdamW does not take them"),
        ("AdamW", {"weight_decay": -1}, "AdamW does not take them: Invalid weight_decay value: -1"),
        ("AdamW", {"betas": "0.9, 0.95"}, "params.betas='0.9, 0.95': it must be two numbers"),
        ("Adam", {"betas": [0.9]}, r"params.betas=\[0.9\]: it must be two numbers"),
        ("Adam", {"betas": 0.9}, "params.betas=0.9: it must be two numbers"),
    ],
)
def test_what_is_not_known_is_refused(kind: str, params: Any, says: str) -> None:
    with pytest.raises(tiermem.ConfigError, match=says):
        from_config("a file", kind, params, CPU)
    model = build()
    before = [p.data_ptr() for p in model.parameters()]
    wrong = config(optimizer={"type": kind, "params": params}, bf16={"enabled": True})
    with pytest.raises(tiermem.ConfigError, match=says):
        deepspeed.initialize(model=model, config=wrong)
    assert [p.data_ptr() for p in model.parameters()] == before


def moments(t: int, m: float, v: float, g: float, betas: tuple[float, float]) -> Any:
    """Both moments after a gradient, and their bias corrections."""
    m, v = betas[0] * m + (1 - betas[0]) * g, betas[1] * v + (1 - betas[1]) * g * g
    return m, v, 1 - betas[0] ** t, 1 - betas[1] ** t


GRADIENTS = [[0.5, -1.0, 0.25], [0.1, 0.2, -0.3], [-2.0, 1.0, 0.5]]
START = [1.0, -2.0, 0.5]
LR, DECAY, EPS, BETAS = 0.1, 0.2, 1e-3, (0.8, 0.9)


def stepped(make: Any) -> list[float]:
    """A parameter of three numbers after the gradients."""
    param = torch.tensor(START, dtype=torch.float64, requires_grad=True)
    optimizer = make([param])
    for gradient in GRADIENTS:
        param.grad = torch.tensor(gradient, dtype=torch.float64)
        optimizer.step()
    return param.tolist()


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("corrected", [True, False])
def test_adam_by_its_formula(decoupled: bool, corrected: bool) -> None:
    expected = []
    for index, p in enumerate(START):
        m = v = 0.0
        for t, gradients in enumerate(GRADIENTS, 1):
            g = gradients[index] + (0 if decoupled else DECAY * p)
            m, v, low, high = moments(t, m, v, g, BETAS)
            if not corrected:
                low = high = 1.0
            update = (m / low) / (math.sqrt(v / high) + EPS)
            p -= LR * (update + (DECAY * p if decoupled else 0))
        expected.append(p)
    shared = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": DECAY}
    for cls, mode in ((deepspeed.FusedAdam, "adam_w_mode"),
                      (deepspeed.DeepSpeedCPUAdam, "adamw_mode")):  # fmt: skip
        options = {**shared, "bias_correction": corrected, mode: decoupled}
        assert stepped(lambda ps, c=cls, o=options: c(ps, **o)) == pytest.approx(
            expected, rel=1e-12
        )
    cls, settings = from_config("f", "Adam", {**shared, "adam_w_mode": decoupled,
                                              "bias_correction": corrected}, CPU)  # fmt: skip
    assert stepped(lambda ps: cls(ps, **settings)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("corrected", [True, False])
@pytest.mark.parametrize("most", [10.0, 0.5])
def test_lamb_by_its_formula(inside: bool, corrected: bool, most: float) -> None:
    p, m, v = list(START), [0.0] * 3, [0.0] * 3
    for t, gradients in enumerate(GRADIENTS, 1):
        update = []
        for i, g in enumerate(gradients):
            m[i], v[i], low, high = moments(t, m[i], v[i], g, BETAS)
            root = math.sqrt(v[i] + EPS) if inside else math.sqrt(v[i]) + EPS
            update.append(m[i] / root + DECAY * p[i])
        ratio = math.hypot(*p) / math.hypot(*update)
        ratio = min(max(ratio, 0.01), most)
        rate = LR * math.sqrt(high) / low if corrected else LR
        p = [x - rate * ratio * u for x, u in zip(p, update, strict=True)]
    found = stepped(
        lambda ps: deepspeed.FusedLamb(ps, LR, corrected, BETAS, EPS, inside, DECAY, max_coeff=most)
    )
    assert found == pytest.approx(p, rel=1e-9)


def test_lion_by_its_formula() -> None:
    expected = []
    for index, p in enumerate(START):
        m = 0.0
        for gradients in GRADIENTS:
            g = gradients[index]
            sign = math.copysign(1.0, BETAS[0] * m + (1 - BETAS[0]) * g)
            p = p * (1 - LR * DECAY) - LR * sign
            m = BETAS[1] * m + (1 - BETAS[1]) * g
        expected.append(p)
    assert stepped(lambda ps: FusedLion(ps, LR, BETAS, DECAY)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    "settings",
    [
        {"type": "Adam", "params": {"lr": "1e-2", "betas": [0.9, 0.95]}},
        {"type": "Adam", "params": {"lr": 1e-2, "adam_w_mode": False, "weight_decay": 0.1}},
        {"type": "SGD", "params": {"lr": 1e-2, "momentum": 0.9}},
        {"type": "Lamb", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        {"type": "Lion", "params": {"lr": 1e-3}},
        {"type": "Adam", "params": {"lr": 1e-2, "bias_correction": False}},
    ],
)
def test_a_files_optimizer_is_bit_for_bit_the_plain_loops(settings: Any) -> None:
    params = {k: float(v) if k == "lr" else v for k, v in settings["params"].items()}
    cls, made = from_config("a file", settings["type"], params, CPU)
    with started(config(optimizer=settings)) as engine:
        assert train(engine, 4) == plain(4, make=lambda ps: cls(ps, **made))


@pytest.mark.parametrize("cls", [deepspeed.FusedAdam, deepspeed.DeepSpeedCPUAdam])
def test_deepspeeds_names_are_stepped_by_torchs_classes(cls: Any) -> None:
    settings = config()
    del settings["optimizer"]
    model = build()
    client = cls(model.parameters(), lr=1e-2, weight_decay=0.1)
    with started(settings, model, optimizer=client) as engine:
        assert repr(engine.optimizer).startswith("AdamW (")
        assert train(engine, 4) == plain(4)
    model = build()
    client = cls(model.parameters(), 1e-2, False)
    with started(settings, model, optimizer=client) as engine:
        expected = plain(4, make=lambda ps: Adam(ps, 1e-2, False))
        assert train(engine, 4) == expected
    with pytest.raises(tiermem.ConfigError, match="no AMSGrad"):
        cls(build().parameters(), amsgrad=True)
    assert deepspeed.ops.adam.FusedAdam is deepspeed.FusedAdam
    assert deepspeed.ops.lamb.FusedLamb is deepspeed.FusedLamb
    assert deepspeed.ops.lion.FusedLion is deepspeed.FusedLion


def test_an_optimizer_that_has_stepped_goes_on() -> None:
    model = build()
    client = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(torch.ones(2, 32)).square().mean().backward()
    client.step()
    client.zero_grad()
    settings = config()
    with started(settings, model, optimizer=client) as engine:
        assert all(int(s["step"]) == 1 for s in engine.optimizer.state_dict()["state"].values())


def test_hooks_and_settings_of_the_callers_optimizer_are_kept() -> None:
    """A setting that is no default is read from the attribute of its name."""

    class Flipped(torch.optim.SGD):
        def __init__(self, params: Any, lr: float, sign: float) -> None:
            super().__init__(params, lr=lr)
            self.sign = sign

        def step(self, closure: Any = None) -> Any:
            for param in self.param_groups[0]["params"]:
                if param.grad is not None:
                    param.grad.mul_(self.sign)
            return super().step(closure)

    called = []
    model = build()
    client = Flipped(model.parameters(), 1e-2, -1.0)
    client.register_step_pre_hook(lambda *_: called.append("before"))
    client.register_step_post_hook(lambda *_: called.append("after"))
    settings = config()
    del settings["optimizer"]
    with started(settings, model, optimizer=client) as engine:
        found = train(engine, 4)
    assert called == ["before", "after"] * 4
    assert found == plain(4, make=lambda ps: Flipped(ps, 1e-2, -1.0))


def test_an_optimizer_that_cannot_be_made_again_is_refused() -> None:
    class Odd(torch.optim.SGD):
        def __init__(self, params: Any, secret: int) -> None:
            super().__init__(params, lr=0.1 * secret)

    model = build()
    with pytest.raises(tiermem.ConfigError, match=r"Odd cannot be made again .* needs .secret"):
        deepspeed.initialize(model=model, config=config(), optimizer=Odd(model.parameters(), 1))


def test_a_norm_among_the_optimizers_settings_is_clipping() -> None:
    params = {"lr": 1e-2, "weight_decay": 0.1, "max_grad_norm": 0.05}
    with started(config(optimizer={"type": "AdamW", "params": params})) as engine:
        assert train(engine, 4) == plain(4, clip=0.05)
    with started(config(optimizer={"type": "AdamW", "params": params},
                        gradient_clipping=0.5)) as engine:  # fmt: skip
        assert engine.gradient_clipping() == 0.5


def test_compressed_optimizers_are_explained() -> None:
    row = deepspeed.explain({"optimizer": {"type": "OneBitAdam"}})["optimizer.type"]
    assert row.effect == "without compression: one process exchanges nothing"
