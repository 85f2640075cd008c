"""Values of state dicts, which are copies: a program that writes to them is told that once.

With torch a state dict has the memory of the model's tensors, and some programs write the model by
it: ``model.state_dict()[name].copy_(value)``, averages over ``state_dict().values()``. Here the
values are copies in host memory, and nothing would happen. Nor can what is written be taken over:
``value.cpu()`` is another tensor on a GPU, which programs average in place, and here the same one.
"""

from __future__ import annotations

import warnings
from weakref import ref

import torch

_HELD = 64 << 20
"""Bytes of values that are kept until the next look, as nobody else may have them by then; of what
is larger it is only seen what a program keeps."""
_SELDOM = 16
"""Of so many looks one is made, besides the first: a program may keep a thousand for long."""


class GivenStates:
    """The values that programs were given, until one of them is found written."""

    __slots__ = ("_given", "_held", "_looks", "_nbytes", "_told")

    def __init__(self) -> None:
        """Starts with none."""
        self._given: dict[int, tuple[str, ref[torch.Tensor], int]] = {}  # by the copy's id
        self._held: list[torch.Tensor] = []
        self._nbytes = self._looks = 0
        self._told = False

    def note(self, name: str, copy: torch.Tensor) -> None:
        """Notes that a program is given a copy of a tensor.

        Args:
            name: In the state dict.
            copy: It, just made.
        """
        # torch counts no writes of the second, and knows no size of what is not strided
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
