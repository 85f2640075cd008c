"""Modules that have the weights of many experts stacked in one parameter each.

transformers has them since version 5: parameters of shape ``[experts, ...]``, and a forward
that gets the hidden states, the experts that each token has chosen, and their weights.
Such a module either loops over the chosen experts (``self.weight[expert]``), or computes a product
for each chosen pair (``self.weight[experts]``), or a grouped product, in which the groups of
experts not chosen are empty (``torch.nn.functional.grouped_mm``).
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import types
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import nn

_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "num_routed_experts")
_DECORATOR = "transformers/integrations/moe.py"
_KNOWN = ("grouped_mm", "batched_mm")
"""Implementations in transformers that read only rows of the chosen experts."""
_INDICES = (torch.int64, torch.int32)
_item = dict.get  # looks a name up without fetching anything


def experts_of(module: nn.Module) -> int:
    """Returns how many experts a module has stacked in its parameters; 0 for other modules."""
    own: dict[str, Any] = module.__dict__["_parameters"]
    params = [_item(own, name) for name in own]
    shapes = [tuple(param.shape) for param in params if param is not None]
    if not any(len(shape) >= 3 for shape in shapes) or any(map(_has_own, module.children())):
        return 0
    if any(buffer is not None for buffer in module.__dict__["_buffers"].values()):
        return 0
    experts = shapes[0][0]
    if experts < 2 or any(len(s) < 2 or s[0] != experts for s in shapes):
        return 0
    said = [module.__dict__.get(name) for name in _COUNTS if name in module.__dict__]
    kind: Any = type(module)
    return experts if experts in said and _takes_choices(kind) else 0


def _has_own(module: nn.Module) -> bool:
    return any(True for _ in module.parameters()) or any(True for _ in module.buffers())


@lru_cache(maxsize=256)
def _takes_choices(kind: Any) -> bool:
    """Whether the forward of a class takes hidden states, choices and weights."""
    try:
        names = list(inspect.signature(kind.forward).parameters)
    except (TypeError, ValueError):
        return False
    return len(names) >= 4


def reads_rows(module: nn.Module) -> str:
    """Returns how a module of stacked experts reads them, if it reads chosen rows only.

    Returns:
        ``"eager"``, ``"batched_mm"`` or ``"grouped_mm"``; empty if unknown.
    """
    kind: Any = type(module)
    names = tuple(module.__dict__["_parameters"])
    if "forward" in module.__dict__ or getattr(module, "_is_expert_parallel", False):
        return ""
    forward = kind.forward
    file = getattr(getattr(forward, "__code__", None), "co_filename", "").replace("\\", "/")
    if not file.endswith(_DECORATOR):
        return "eager" if only_subscripts(forward, names) else ""
    asked = getattr(getattr(module, "config", None), "_experts_implementation", "")
    if asked in _KNOWN:
        return str(asked)
    plain = getattr(forward, "__wrapped__", None)
    if asked in (None, "eager") and plain is not None and only_subscripts(plain, names):
        return "eager"
    return ""


@lru_cache(maxsize=256)
def only_subscripts(function: Callable[..., Any], names: tuple[str, ...]) -> bool:
    """Whether a method uses these attributes of ``self`` only as ``self.name[...]``, to read.

    ``self.name[i] = x``, ``self.name[i] += x`` and ``self.name[i].mul_(x)``
    write the parameter, of which rows are copies.
    """
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return False
    subscripted = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load)
    }
    found, given = False, (*names, *_named(tree, names))
    around: Any = getattr(function, "__globals__", {})
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in names:
            if id(node) not in subscripted or not isinstance(node.ctx, ast.Load):
                return False
            found = True
        if _is_written(node, given, around):
            return False
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "vars"):
            return False
    return found


def _named(tree: ast.AST, names: tuple[str, ...]) -> set[str]:
    """Returns the variables that are assigned some attributes, or views of them."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr) and node.value is not None:
            values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(_looks_at(value, names) for value in values):
                walked = (inner for target in targets for inner in ast.walk(target))
                found |= {inner.id for inner in walked if isinstance(inner, ast.Name)}
    return found


def _is_written(node: ast.AST, names: tuple[str, ...], around: Mapping[str, Any]) -> bool:
    """Whether an operation changes some attributes or variables in place.

    Args:
        node: The operation.
        names: The attributes and variables.
        around: Values of outside names: functions of modules write their first argument.
    """
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        method = node.func.attr
        in_place = method.endswith("_") and not method.endswith("__")
        if _is_module(node.func.value, around):  # ``torch.clamp_(row, 0)``, ``F.relu_(row)``
            inplace = any(k.arg == "inplace" for k in node.keywords)
            values = [*node.args[:1], *(k.value for k in node.keywords if k.arg == "input")]
            return (in_place or inplace) and any(_looks_at(value, names) for value in values)
        return in_place and _looks_at(node.func.value, names)
    if isinstance(node, ast.keyword):
        return node.arg == "out" and _looks_at(node.value, names)
    if isinstance(node, ast.AugAssign):
        return _looks_at(node.target, names)
    stored = isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load)
    return stored and _looks_at(node, names)


def _is_module(node: ast.AST, around: Mapping[str, Any]) -> bool:
    """Whether an expression is a module's name (``torch.nn.functional``)."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    value = around.get(getattr(node, "id", ""))
    while parts and isinstance(value, types.ModuleType):
        value = getattr(value, parts.pop(), None)
    return isinstance(value, types.ModuleType)


def _looks_at(node: Any, names: tuple[str, ...]) -> bool:
    """Whether an expression is one of these attributes or variables, or may be a view of one."""
    while node is not None:
        if getattr(node, "attr", "") in names or getattr(node, "id", "") in names:
            return True
        node = getattr(node, "value", None) or getattr(node, "func", None)
    return False


def choices_in(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """Returns the indices of chosen experts among the arguments of a call.

    None unless there is exactly one tensor of indices, with at most two dimensions.
    """
    found, tensors = None, 0
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, torch.Tensor):
            tensors += 1
            if value.dtype in _INDICES:
                if found is not None:
                    return None
                found = value
    return found if type(found) is torch.Tensor and tensors >= 3 else None
