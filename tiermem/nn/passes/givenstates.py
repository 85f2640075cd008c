"""Warns once if a program writes to values of a state dict, which are copies.

With torch, a state dict shares the memory of the model's tensors, and some programs write the model
through it: ``model.state_dict()[name].copy_(value)``, averages over ``state_dict().values()``. Here
the values are copies in host memory, and such a write has no effect. Writes cannot be copied to the
model either: on a GPU, ``value.cpu()`` is a new tensor, which programs average in place, while here
it is the value itself.
"""

from __future__ import annotations

import warnings
from weakref import ref

import torch

_HELD = 64 << 20
"""Bytes of values that are kept until the next check, as the program may have dropped them by then.
Larger values are only checked if the program keeps them."""
_SELDOM = 16
"""After the first check, only one in this many is made, as a program may keep many values long."""


class GivenStates:
    """The values that programs got, until one of them is found written."""

    __slots__ = ("_given", "_held", "_looks", "_nbytes", "_told")

    def __init__(self) -> None:
        """Starts with none."""
        self._given: dict[int, tuple[str, ref[torch.Tensor], int]] = {}  # by the copy's id
        self._held: list[torch.Tensor] = []
        self._nbytes = self._looks = 0
        self._told = False

    def note(self, name: str, copy: torch.Tensor) -> None:
        """Notes that a program gets a copy of a tensor.

        Args:
            name: Name in the state dict.
            copy: The copy, just made.
        """
        # torch counts no writes of inference tensors, and has no storage size for other layouts
        if self._told or copy.is_inference() or copy.layout is not torch.strided:
            return
        self._given[id(copy)] = name, ref(copy), copy._version
        if self._nbytes + copy.nbytes <= _HELD:
            self._held.append(copy)
            self._nbytes += copy.nbytes
        self._looks = 0

    def loaded(self, value: torch.Tensor) -> None:
        """Notes that the model has a value by now, whatever was written to it before.

        Args:
            value: What a wrapped module has loaded; it need not be from a state dict of its own.
        """
        found = self._given.get(id(value))
        if found is not None and found[1]() is value:  # the id may have been another one's
            self._given[id(value)] = *found[:2], value._version

    def look(self) -> None:
        """Warns if any was written; called before the model is used."""
        if not self._given:
            return
        self._looks += 1
        if self._looks > 1 and self._looks % _SELDOM:
            return
        given, self._given = self._given, {}
        held, self._held, self._nbytes = self._held, [], 0
        for name, copy, version in given.values():
            value = copy()
            if value is not None and value._version != version:
                self._told = True
                warnings.warn(
                    f"state_dict()[{name!r}] was written in place, which does not change the "
                    "model: values of a wrapped model's state_dict() are copies in host memory. "
                    "If it was to change the model, write to parameters and buffers themselves, "
                    "inside `with tier.materialize(module):`, or call load_state_dict(). (This is "
                    "said once; clone() a value to change it alone.)",
                    UserWarning,
                    stacklevel=3,
                )
                return
        value = None
        held.clear()
        self._given = {key: found for key, found in given.items() if found[1]() is not None}
