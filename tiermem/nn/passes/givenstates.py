"""Values of state dicts, which are copies: what a program writes to them reaches the tensors.

With torch a state dict has the memory of the model's tensors, and programs write the model by it:
``model.state_dict()[name].copy_(value)``, averages over ``state_dict().values()``. Here the values
are copies in host memory. So they are looked at before the tensors are used again, and those that
were written since are copied into their tensors.

They are kept until then: with ``for value in model.state_dict().values(): value.mul_(0.5)`` nobody
else has them any more.
"""

from __future__ import annotations

from operator import attrgetter

import torch

from tiermem.errors import ParameterError
from tiermem.nn.compat.quiet import unrecorded
from tiermem.nn.groups.above import Here
from tiermem.nn.tensors.lazy import is_elsewhere, is_held, is_shared

_SELDOM = 16
"""Of so many looks one frees what nobody else has, besides the first."""
_version_now, _version = attrgetter("copy._version"), attrgetter("version")


class _Given:
    """A value that a program was given.

    Attributes:
        name: In the state dict.
        copy: The value.
        tensor: Of the model.
        version: Of the copy, when the two were last alike.
        at: Version of the tensor then.
    """

    __slots__ = ("at", "copy", "name", "tensor", "version")

    def __init__(self, name: str, copy: torch.Tensor, tensor: torch.Tensor) -> None:
        self.name, self.copy, self.tensor = name, copy, tensor
        self.version, self.at = copy._version, tensor._version


class GivenStates:
    """The values that programs were given and may still write."""

    __slots__ = ("_busy", "_here", "_looks", "given")

    def __init__(self, here: Here) -> None:
        """Starts with none.

        Args:
            here: Where the calling thread is.
        """
        self.given: dict[int, _Given] = {}
        self._here = here
        self._busy = False
        self._looks = 0  # since one was given

    def note(self, name: str, copy: torch.Tensor, tensor: torch.Tensor) -> None:
        """Notes that a program is given a copy of a tensor.

        Args:
            name: In the state dict.
            copy: It, just made.
            tensor: Of the model.
        """
        if not (copy.is_inference() or tensor.is_inference()):  # of which torch counts no writes
            self.given[id(copy)] = _Given(name, copy, tensor)
            self._looks = 0

    def take_in(self) -> None:
        """Copies what was written into the tensors; called before these are used.

        Raises:
            ParameterError: If a tensor was changed after the state dict was made, and then the
                value in that: with torch, the former would have changed the latter.
        """
        if self._busy or self._here.is_in_pass():
            return
        known = self.given.values()
        written = [*map(_version_now, known)] != [*map(_version, known)]
        self._looks += 1
        if not written and self._looks > 1 and self._looks % _SELDOM:
            return  # a program may keep a thousand of them for long
        refused: _Given | None = None
        try:
            self._busy = True
            for key, given in [*self.given.items()]:
                copy = given.copy
                if copy._version != given.version and not _write(given):
                    refused = refused or given
                if not (is_held(copy, besides=1) or is_elsewhere(copy) or is_shared(copy)):
                    self.given.pop(key, None)
        finally:
            self._busy = False
        if refused is not None:
            raise ParameterError(
                f"state_dict()[{refused.name!r}] was written after the model had changed what it "
                "is a copy of (a step, a load): values of a state dict are as of its call; call "
                "state_dict() anew to write the model by it, or clone a value to change that alone"
            )

    def forget(self) -> None:
        """Forgets all of them: the tiers are gone."""
        self.given.clear()


def _write(given: _Given) -> bool:
    """Copies a value into its tensor; returns whether that had not changed since."""
    given.version, before = given.copy._version, given.version  # what is refused is said once
    if given.tensor._version != given.at:
        return False
    try:
        # the functions of hidden tensors are off inside an operation on another one
        with unrecorded(), torch._C._EnableTorchFunction():
            given.tensor.copy_(given.copy)
    except BaseException:
        given.version = before
        raise
    given.at = given.tensor._version
    return True
