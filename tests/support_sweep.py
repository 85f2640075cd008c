"""What the sweep over architectures does with one model, beside the plain one."""

from __future__ import annotations

import copy
import gc
import re
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from support_nn import asked, assert_same, check_table, leaves, scalar_of, seed
from support_shrunk import Inputs, NotSmallError, said, small_model, weights
from torch import nn
from torch.utils._pytree import tree_map_only

import tiermem

DRAM = 256 << 20
device = torch.device("cpu")
"""On which models run; the sweep sets it."""
SLOW = 20
"""Times the plain model's time from which it is said how slow one is."""


@dataclass(frozen=True)
class Case:
    """A class to be tried.

    Attributes:
        name: What it is called.
        group: Its kind.
        small: Returns what makes a small model, and what makes inputs for it by a number (0, 1).
        cls: Returns the class with ``from_pretrained``, or None.
    """

    name: str
    group: str
    small: Callable[[], tuple[Callable[[], nn.Module], Inputs]]
    cls: Callable[[], Any] = lambda: None


class DifferError(Exception):
    """Results that are not the plain model's."""


Outcome = dict[str, Any]


def of_transformers(kind: str, model_type: str, name: str) -> Case:
    """Returns the case of a class of transformers."""

    def cls() -> Any:
        import transformers

        found = getattr(transformers, name, None)
        if found is None or not hasattr(found, "_from_config"):
            raise NotSmallError(f"{name} is no class that can be made here")
        return found

    def config() -> Any:
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        own = getattr(cls(), "config_class", None)
        made = (own or CONFIG_MAPPING[model_type])()
        made._experts_implementation = "eager"  # others round differently by where bytes lie
        return made

    def build(made: Any) -> nn.Module:
        own = copy.deepcopy(made)
        own._experts_implementation = "eager"
        model = cls()._from_config(own)
        return (
            model.float() if any(p.dtype == torch.bfloat16 for p in model.parameters()) else model
        )

    return Case(name, kind, lambda: small_model(cls(), config, build), cls)


def of_diffusers() -> list[Case]:
    """Returns cases of models of diffusers."""
    from support_odd_models import DIFFUSERS

    return [Case(name, "diffusers", made, cls) for name, (made, cls) in DIFFUSERS.items()]


def of_torch() -> list[Case]:
    """Returns cases of modules of torch in odd shapes."""
    from support_odd_models import TORCH

    return [Case(name, "torch", lambda pair=pair: pair) for name, pair in TORCH.items()]


def try_case(case: Case, parts: list[str], folder: Path) -> Iterator[tuple[str, Outcome]]:
    """Tries the parts of a case; yields what came of each."""
    began = time.monotonic()
    try:
        make, inputs = case.small()
        make()
    except NotSmallError as error:
        yield "wrap", {"kind": "skipped", "why": str(error)[:600]}
        return
    took = time.monotonic() - began
    make, inputs = _on_device(make, inputs)
    todo: dict[str, Callable[[], str]] = {}
    if "wrap" in parts:
        todo["wrap"] = lambda: wrapped(make, inputs)
    if "load" in parts and case.cls() is not None:
        todo["load"] = lambda: loaded(case.cls(), make, inputs, folder / "model")
    for part, compare in (("lora", adapted), ("ways", adapted_in_ways)):
        if part in parts and case.cls() is not None:
            todo[part] = lambda compare=compare: (
                None if (folder / "model").exists() else saved(make, folder / "model"),
                compare(case.cls(), inputs, folder / "model"),
            )[1]
    for part, what in todo.items():
        began = time.monotonic()
        outcome: Outcome
        try:
            note = what()
            outcome = {"kind": "same", "why": note}
        except SkippedError as error:
            outcome = {"kind": "skipped", "why": str(error)}
        except tiermem.TierError as error:
            outcome = {"kind": "refused", "why": str(error)[:800], "trace": _trace()}
        except (DifferError, AssertionError) as error:
            outcome = {"kind": "differs", "why": str(error)[:600], "trace": _trace()}
        except Exception as error:
            outcome = {"kind": "failed", "why": said(error), "trace": _trace()}
        outcome["took"] = round(time.monotonic() - began, 2)
        outcome["making"] = round(took, 2)
        yield part, outcome
        gc.collect()


def _on_device(make: Callable[[], Any], inputs: Inputs) -> tuple[Callable[[], Any], Inputs]:
    """Has a model made, and its inputs drawn, as they are on the CPU, and moved to the device."""

    def moved(length: int) -> Any:
        return tree_map_only(torch.Tensor, lambda t: t.to(device), inputs(length))

    return lambda: make().to(device), moved


def _trace() -> str:
    return traceback.format_exc()[-5000:]


class SkippedError(Exception):
    """The plain model does not do that either."""


# -- what is compared ------------------------------------------------------------------------


def run_eval(model: Any, inputs: Inputs) -> list[Any]:
    """Returns the outputs of three forward passes of two lengths."""
    model.eval()
    outputs = []
    for turn, length in enumerate((0, 1, 0)):
        seed(3 + turn)
        given = inputs(length)
        seed(5 + turn)
        with torch.no_grad():
            outputs.append(_cloned(model(**given)))
    return outputs


def _cloned(value: Any) -> list[tuple[str, Any]]:
    return [(p, _kept(v)) for p, v in leaves(value) if not isinstance(v, str)]


def _kept(value: Any) -> Any:
    """Returns a value as it is now; a tensor's on the CPU."""
    return value.detach().clone().cpu() if isinstance(value, torch.Tensor) else value


def run_generate(model: Any, inputs: Inputs) -> Any:
    """Returns what ``generate`` makes, greedily and with a cache."""
    model.eval()
    seed(7)
    given = {k: v for k, v in inputs(0).items() if not k.startswith("decoder")}
    seed(8)
    with torch.no_grad():
        return _cloned(model.generate(**given, max_new_tokens=5, do_sample=False))


def run_training(model: Any, optimizer: Any, inputs: Inputs, steps: int = 3) -> list[Any]:
    """Trains; returns the losses, and which parameters had gradients."""
    model.train()
    seen: list[Any] = []
    for step in range(steps):
        seed(20 + step)
        given = inputs(step % 2)
        seed(30 + step)
        loss = scalar_of(model(**given))
        if loss is None:
            raise SkippedError("no output has a gradient")
        loss.backward()
        seen.append(_kept(loss))
        optimizer.step()
        optimizer.zero_grad()
    return seen


def tensors_of(model: nn.Module) -> dict[str, Any]:
    """Returns state, buffers that are not in it, and which parameters are one."""
    state = {
        f"state {k}": _kept(v) for k, v in model.state_dict().items() if isinstance(v, torch.Tensor)
    }
    state.update({f"buffer {k}": _kept(v) for k, v in model.named_buffers(remove_duplicate=False)})
    first: dict[int, str] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        state[f"tie {name}"] = first.setdefault(id(param), name)
        state[f"kind {name}"] = (str(param.dtype), param.requires_grad, tuple(param.shape))
        state[f"stride {name}"] = torch.empty_like(param, device="meta").stride()  # without gaps
    state["training"] = model.training
    return state


def _plain(make: Callable[[], Any], inputs: Inputs, what: Callable[..., Any]) -> Any:
    """Returns what a plain model gives; SkippedError where it fails."""
    try:
        return what(make(), inputs)
    except Exception as error:
        raise SkippedError(f"the plain model: {said(error)}") from error


@contextmanager
def comparing(what: str) -> Iterator[None]:
    try:
        yield
    except AssertionError as error:
        raise DifferError(f"{what}: {str(error)[:400]}") from error


def elsewhere(model: nn.Module, shift: int = 1) -> nn.Module:
    """Moves each parameter to other bytes, to see whether results are rounded by where they lie."""
    seen: dict[int, torch.Tensor] = {}
    for param in model.parameters():
        if id(param) in seen or not param.is_contiguous():
            continue
        seen[id(param)] = param
        room = torch.empty(param.numel() + shift, dtype=param.dtype, device=param.device)
        moved = room[shift:].view(param.shape)
        moved.copy_(param.detach())
        param.data = moved
    return model


def _stable(make: Callable[[], Any], use: Callable[[Any], Any], expected: Any) -> None:
    """Raises SkippedError where a plain model's results depend on the run or on addresses."""
    for shift in (0, 1, 4, 16):
        try:
            assert_same(expected, use(elsewhere(make(), shift)), "plain")
        except AssertionError as error:
            raise SkippedError("the plain model rounds by where its weights lie") from error


def wrapped(make: Callable[[], Any], inputs: Inputs) -> str:
    """Compares a wrapped model with a plain one; returns what is worth a note."""
    notes: list[str] = []
    plain = make()
    total = weights(plain)
    times = {"plain": 0.0, "tiered": 0.0}
    began = time.monotonic()
    expected = _plain(make, inputs, run_eval)
    evaluated = make()
    run_eval(evaluated, inputs)
    after = tensors_of(evaluated)
    times["plain"] += time.monotonic() - began
    generated = trains = None
    if hasattr(plain, "generate"):
        try:
            generated = run_generate(make(), inputs)
        except Exception as error:
            notes.append(f"no generate: {said(error)}")
    try:
        began = time.monotonic()
        run_eval(plain, inputs)
        optimizer = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=1e-3)
        trains = run_training(plain, optimizer, inputs)
        times["plain"] += time.monotonic() - began
    except Exception as error:
        notes.append(f"no training: {said(error)}")

    def evaluate(tier: tiermem.TierManager, model: Any) -> None:
        began = time.monotonic()
        found = run_eval(model, inputs)
        times["tiered"] = time.monotonic() - began
        with comparing("forward"):
            _same(
                expected,
                found,
                "output",
                lambda: _stable(make, lambda m: run_eval(m, inputs), expected),
            )
        if generated is not None:
            found = run_generate(model, inputs)
            with comparing("generate"):
                assert_same(generated, found, "ids")
        check_table(tier)

    def train(tier: tiermem.TierManager, model: Any) -> None:
        began = time.monotonic()
        run_eval(model, inputs)
        if trains is None:
            return
        stepper = tier.optimizer(
            [p for p in model.parameters() if p.requires_grad], torch.optim.AdamW, lr=1e-3
        )
        found = run_training(model, stepper, inputs)
        times["tiered"] += time.monotonic() - began
        with comparing("training"):
            _same(
                trains,
                found,
                "losses",
                lambda: _stable(make, _trains(inputs), (trains, tensors_of(plain))),
            )
        del stepper

    for what, use in (("forward", evaluate), ("training", train)):
        other = plain if what == "training" and trains is not None else None
        budget = under_budget(
            make, max(total // 3, 4096), use, after if other is None else None, other
        )
        if budget > (3 if what == "forward" else 6) * total + (256 << 10):
            notes.append(f"{what} needs hbm={budget} for {total} bytes of weights")
    if times["tiered"] > SLOW * times["plain"] + 1:
        notes.append(f"slow: {times['tiered']:.2f} s, plain {times['plain']:.2f} s")
    return "; ".join(notes)


def _trains(inputs: Inputs) -> Callable[[Any], Any]:
    def use(model: Any) -> Any:
        run_eval(model, inputs)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        return run_training(model, optimizer, inputs), tensors_of(model)

    return use


def _same(expected: Any, found: Any, what: str, stable: Callable[[], None]) -> None:
    try:
        assert_same(expected, found, what)
    except AssertionError:
        stable()
        raise


def under_budget(
    make: Callable[[], Any],
    hbm: int,
    use: Callable[[tiermem.TierManager, Any], None],
    after: dict[str, Any] | None,
    plain: Any,
) -> int:
    """Wraps and uses a model under the least budget that errors ask for; compares it in the end."""
    dram = DRAM
    for _ in range(12):
        model = make()
        tied = tensors_of(model)
        try:
            with tiermem.TierManager(device=device, hbm=hbm, dram=dram) as tier:
                tier.wrap(model)
                with comparing("wrapped"):
                    assert_same(
                        {k: v for k, v in tied.items() if k[:4] != "buff"},
                        {k: v for k, v in tensors_of(model).items() if k[:4] != "buff"},
                        "",
                    )
                use(tier, model)
                expected = tensors_of(plain) if plain is not None else after
                with comparing("state_dict"):
                    assert_same(expected | {"training": model.training}, tensors_of(model), "")
            with comparing("closed"):
                assert_same(expected | {"training": model.training}, tensors_of(model), "")
            return hbm
        except tiermem.CapacityError as error:
            which, least = asked(error)
            if which == "hbm" and least > hbm:
                hbm = least
            elif which == "dram" and least > dram:
                dram = least
            else:
                raise DifferError(f"asks for {which}={least} and has it: {error}") from error
    raise DifferError("the least budget was never enough")


def saved(make: Callable[[], Any], folder: Path) -> Any:
    """Saves a plain model."""
    try:
        make().save_pretrained(folder)
    except Exception as error:
        raise SkippedError(f"save_pretrained: {said(error)}") from error


def _from_pretrained(cls: Any, folder: Path, dtype: torch.dtype | None = None) -> Any:
    try:
        of_transformers = hasattr(cls, "_from_config")
        more = {"experts_implementation": "eager"} if of_transformers else {}
        own = {} if dtype is None else {"dtype" if of_transformers else "torch_dtype": dtype}
        try:
            model = cls.from_pretrained(folder, **more, **own)
        except (TypeError, ValueError):
            model = cls.from_pretrained(folder, **own)
    except Exception as error:
        raise SkippedError(f"from_pretrained: {said(error)}") from error
    for param in model.parameters():
        param.data = param.data.clone(memory_format=torch.preserve_format)
    return model.to(device)


def with_enough(hbm: int, compare: Callable[[int], None]) -> None:
    """Compares with so many bytes of HBM, or with as many as errors ask for."""
    for _ in range(12):
        try:
            return compare(hbm)
        except tiermem.CapacityError as error:
            which, least = asked(error)
            if which != "hbm" or least <= hbm:
                raise
            hbm = least
    raise DifferError("the least budget was never enough")


def loaded(cls: Any, make: Callable[[], Any], inputs: Inputs, folder: Path) -> str:
    """Compares load_checkpoint with from_pretrained."""
    saved(make, folder)
    seed(40)
    plain = _from_pretrained(cls, folder)
    generator = torch.get_rng_state()
    first = tensors_of(plain)
    again = tensors_of(_from_pretrained(cls, folder))
    unsaid = {
        k
        for k in first
        if isinstance(first[k], torch.Tensor)
        and not torch.equal(torch.nan_to_num(first[k]), torch.nan_to_num(again[k]))
    }
    if unsaid:
        raise SkippedError(f"from_pretrained draws at random: {sorted(unsaid)[:3]}")
    try:
        expected = run_eval(plain, inputs)
    except Exception as error:
        raise SkippedError(f"the plain model: {said(error)}") from error
    generated = None
    if hasattr(plain, "generate"):
        try:
            generated = run_generate(plain, inputs)
        except Exception:
            generated = None
    after = tensors_of(plain)

    def compare(hbm: int) -> None:
        with tiermem.TierManager(device=device, hbm=hbm, dram=DRAM) as tier:
            seed(40)
            model: Any = tiermem.load_checkpoint(cls, folder, tier=tier)
            if not torch.equal(torch.get_rng_state(), generator):
                raise DifferError("loaded: the random generator")
            if hasattr(model, "config"):
                _eager(model)
            with comparing("loaded"):
                assert_same(first, tensors_of(model), "")
            found = run_eval(model, inputs)
            with comparing("forward"):
                _same(
                    expected,
                    found,
                    "output",
                    lambda: _stable(
                        lambda: _from_pretrained(cls, folder),
                        lambda m: run_eval(m, inputs),
                        expected,
                    ),
                )
            if generated is not None:
                with comparing("generate"):
                    assert_same(generated, run_generate(model, inputs), "ids")
            with comparing("state"):
                assert_same(after, tensors_of(model), "")
        with comparing("closed"):
            assert_same(after, tensors_of(model), "")

    with_enough(max(weights(plain) // 3, 4096), compare)
    return ""


def _eager(model: Any) -> None:
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and getattr(config, "_experts_implementation", None):
            config._experts_implementation = "eager"


@dataclass(frozen=True)
class How:
    """How adapters are trained.

    Attributes:
        dtype: Of the weights; None for the files'.
        dropout: Of the adapters' inputs.
        reentrant: The kind of gradient checkpointing; None for none.
        optimizer: Its class.
        options: And its options.
        steps: How many, each of two backward passes where there are several.
    """

    dtype: torch.dtype | None = None
    dropout: float = 0.0
    reentrant: bool | None = None
    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW
    options: tuple[tuple[str, Any], ...] = (("lr", 1e-2),)
    steps: int = 1


HOWS = (
    How(torch.bfloat16, 0.1, False, options=(("lr", 1e-2), ("amsgrad", True)), steps=3),
    How(None, 0.1, True, torch.optim.SGD, (("lr", 0.1), ("momentum", 0.9)), steps=3),
    How(torch.bfloat16, 0.0, None, torch.optim.Adafactor, steps=2),
)


def adapted_in_ways(cls: Any, inputs: Inputs, folder: Path) -> str:
    """Compares adapters with peft's, trained in several ways."""
    notes: list[str] = []
    for number, how in enumerate(HOWS):
        try:
            with comparing(f"way {number}"):
                notes.append(adapted(cls, inputs, folder, how))
        except SkippedError as error:
            notes.append(f"way {number}: {error}")
    return "; ".join(filter(None, notes))


def adapted(cls: Any, inputs: Inputs, folder: Path, how: How = How()) -> str:
    """Compares steps of adapters with peft's."""
    resident, targets, note = _peft_model(cls, folder, how)

    def steps(model: Any, make: Callable[..., Any]) -> Any:
        own = [p for p in model.parameters() if p.requires_grad]
        return _adapter_steps(model, make(own, how.optimizer, **dict(how.options)), inputs, how)

    def plain(own: Any, kind: Any, **options: Any) -> Any:
        return kind(own, **options)

    try:
        expected = steps(resident, plain)
    except Exception as error:
        raise SkippedError(f"peft's step: {said(error)}") from error
    lora = tiermem.Lora(r=4, alpha=8, target_modules=targets, dropout=how.dropout)

    def compare(hbm: int) -> None:
        with tiermem.TierManager(device=device, hbm=hbm, dram=DRAM) as tier:
            seed(50)
            more = {} if how.dtype is None else {"dtype": how.dtype}
            model: Any = tiermem.load_checkpoint(cls, folder, tier=tier, lora=lora, **more)
            _eager(model)
            _checkpointing(model, how)
            with comparing("adapters"):
                _same(
                    expected,
                    steps(model, tier.optimizer),
                    "",
                    lambda: _stable(
                        lambda: _peft_model(cls, folder, how)[0],
                        lambda m: steps(m, plain),
                        expected,
                    ),
                )

    with_enough(max(weights(resident) // 3, 4096), compare)
    return note


def _peft_model(cls: Any, folder: Path, how: How) -> tuple[Any, Any, str]:
    """Returns a model with peft's adapters, the target modules asked for, and a note."""
    import peft

    note = ""

    def made(targets: Any) -> Any:
        seed(50)
        base = _from_pretrained(cls, folder, how.dtype)
        config = peft.LoraConfig(
            r=4, lora_alpha=8, target_modules=targets, lora_dropout=how.dropout
        )
        return peft.get_peft_model(base, config)

    targets: Any = None
    try:
        resident = made(None)
    except SkippedError:
        raise
    except Exception as error:
        note = said(error)
        targets = "all-linear"
        try:
            resident = made(targets)
        except Exception as second:
            if "lora_dropout != 0" not in str(second):
                raise SkippedError(f"peft: {said(second)}") from second
            # of parameters, which get adapters without it alone
            resident = _peft_model(cls, folder, replace(how, dropout=0.0))[0]
            targets = _linear_names(resident)
            resident = made(targets)
    if any(type(module).__name__ == "ParamWrapper" for module in resident.modules()):
        targets = _linear_names(resident)
        note = f"peft adapts parameters, too; compared with {targets}"
        resident = made(targets)
    _checkpointing(resident, how)
    return resident, targets, note


def _linear_names(model: Any) -> list[str]:
    """Returns the last names of the linear layers that peft has adapted."""
    import peft

    linear = [n for n, m in model.named_modules() if isinstance(m, peft.tuners.lora.Linear)]
    return sorted({name.rpartition(".")[2] for name in linear})


def _checkpointing(model: Any, how: How) -> None:
    if how.reentrant is None or not getattr(model, "supports_gradient_checkpointing", False):
        return
    with suppress(ValueError):  # a class that says so, and cannot
        model.gradient_checkpointing_enable({"use_reentrant": how.reentrant})
        model.enable_input_require_grads()


_PREFIX = re.compile(r"base_model\.model\.|\.default|\.base_layer|\.modules_to_save")


def _adapter_steps(model: Any, optimizer: Any, inputs: Inputs, how: How) -> Any:
    model.train()
    seen: list[Any] = []
    for step in range(how.steps):
        for part in range(1 if how.steps == 1 else 2):
            seed(60 + step)
            given = inputs((step + part) % 2)
            seed(61 + step)
            loss = scalar_of(model(**given))
            assert loss is not None
            loss.backward()
            seen.append(_kept(loss))
        seen.append(
            {
                _PREFIX.sub("", name): _kept(param.grad)
                for name, param in sorted(model.named_parameters(), key=_plain_name)
                if param.grad is not None
            }
        )
        optimizer.step()
        optimizer.zero_grad()
    return [
        *seen,
        {
            _PREFIX.sub("", name): _kept(param)
            for name, param in sorted(model.named_parameters(), key=_plain_name)
            if param.requires_grad
        },
    ]


def _plain_name(pair: tuple[str, Any]) -> str:
    return _PREFIX.sub("", pair[0])
