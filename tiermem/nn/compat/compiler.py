"""Keeps ``torch.compile`` out of this package's own code, so that it compiles the modules'."""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

WHOLE_GRAPH = (
    "a wrapped model is compiled block by block, since each block is fetched before it runs, so "
    "fullgraph=True works for one block only: call compile(fullgraph=True) on the modules at "
    "which blocks begin (`for layer in model.layers: layer.compile(fullgraph=True)`), or leave "
    "fullgraph out"
)
"""Advice if one graph is requested for several blocks."""

_opaque: set[type] = set()
_hidden: set[str] = set()
_looked_through: tuple[int, str] = (0, "")
_callback: Callable[[], Any] | None = getattr(
    torch._C._dynamo.eval_frame, "get_eval_frame_callback", None
)


def compiling() -> bool:
    """Whether the calling thread is in code that ``torch.compile`` compiles, or may be."""
    return _callback is None or bool(_callback())


def is_autograd_compiled() -> bool:
    """Whether backward passes that begin now are compiled as wholes (compiled autograd)."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return bool(getattr(module, "compiled_autograd_enabled", False))


def leave_to_interpreter(kind: type) -> None:
    """Makes the compiler leave operations on tensors of a class to the interpreter.

    Otherwise it uses the memory of such a tensor as that of the tensor it stands for.

    Args:
        kind: A class whose tensors do not have the memory that they seem to have.
    """
    _opaque.add(kind)
    tell_compiler()


def tell_compiler() -> None:
    """Registers those classes with the compiler, once it is imported; may be called often."""
    config = sys.modules.get("torch._dynamo.config")
    told = getattr(config, "nontraceable_tensor_subclasses", _opaque)
    if not told >= _opaque:
        told |= _opaque


def hide_from_compiler() -> None:
    """Marks the code of every module of tiermem that has been imported since the last time.

    The compiler leaves a marked function to the interpreter and continues with its callees.
    """
    global _looked_through
    tell_compiler()
    names = list(sys.modules)  # with transformers there are thousands, the newest last
    found = len(names), names[-1]
    if found == _looked_through:
        return
    skip = _skipper()
    for name in names:
        if name.partition(".")[0] != "tiermem" or name in _hidden:
            continue
        module = sys.modules.get(name)  # another thread may have removed it
        if module is not None:
            _hidden.add(name)
            for function in _functions(module):
                function.__dict__["_torchdynamo_disable"] = True
                function.__dict__["_torchdynamo_disable_msg"] = WHOLE_GRAPH
                for code in _nested(function.__code__):
                    skip(code)
    _looked_through = found


def _skipper() -> Callable[[types.CodeType], Any]:
    """Returns this torch version's function that excludes a frame from compilation."""
    frames: Any = torch._C._dynamo.eval_frame
    if hasattr(frames, "skip_code"):
        return frames.skip_code  # type: ignore[no-any-return]
    try:
        strategy = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.DEFAULT)
        return partial(_set_strategy, frames.set_code_exec_strategy, strategy)
    except AttributeError:
        return lambda code: None


def _set_strategy(setter: Callable[..., Any], strategy: Any, code: types.CodeType) -> None:
    setter(code, strategy)


def _functions(module: types.ModuleType) -> Iterator[types.FunctionType]:
    for thing in list(vars(module).values()):
        if getattr(thing, "__module__", None) != module.__name__:
            continue
        for function in [thing, *(vars(thing).values() if inspect.isclass(thing) else ())]:
            if isinstance(function, property):
                function = function.fget
            function = inspect.unwrap(getattr(function, "__func__", function) or function)
            if isinstance(function, types.FunctionType):
                yield function


def _nested(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _nested(constant)
