"""The class that performs an optimizer's steps, and what trial steps have shown about it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from tiermem.nn.compat.outside import outside
from tiermem.optim.classes import refuse_draws, refuse_missing, refuse_whole
from tiermem.optim.methods import Counts
from tiermem.optim.rules.groups import with_defaults
from tiermem.optim.rules.probe import StateProbe, zeros_of
from tiermem.optim.rules.separable import Nature, check_separable, settings_of
from tiermem.optim.rules.torchsteps import is_own_class
from tiermem.optim.units.master import master_dtype_of
from tiermem.optim.units.plan import note_spoils
from tiermem.optim.units.unit import StepUnit


class TriedClass:
    """Makes plain optimizers of a class, and knows how the class steps.

    Each parameter group is tried once on tiny tensors: whether the update of a parameter depends
    on others, which counters it has, whether it draws random numbers.

    Attributes:
        cls: The class.
        master_dtype: The dtype of the masters, or None if the weights themselves are stepped.
        defaults: The class's own settings, as ``Optimizer.defaults``; of the groups completed last.
        eager: Whether its constructor makes all state, not the first step.
        fused: Whether its step unscales the gradients of a GradScaler.
        probe: Finds out the state of a parameter; exists after the first :meth:`learn`.
        counts: The counters of the class in its groups.
    """

    probe: StateProbe

    def __init__(
        self,
        cls: type[torch.optim.Optimizer],
        settings: dict[str, Any],
        device: torch.device,
        master_dtype: torch.dtype | None,
        *,
        reorders: bool,
    ) -> None:
        """Starts before any trial.

        Args:
            cls: The class.
            settings: The user's settings.
            device: The device on which steps are performed.
            master_dtype: The dtype of the masters, or None.
            reorders: Whether units may be stepped in another order than that of the parameters.
        """
        self.cls = cls
        self.master_dtype = master_dtype
        self.defaults: dict[str, Any] = {}
        self.eager = self.fused = False
        self.counts = Counts()
        self._settings = settings
        self._device = device
        self._reorders = reorders
        self._zeros: list[tuple[tuple[str, bool], ...]] = []
        self._natures: dict[int, Nature] = {}  # results of trials, by group
        self._whole = False  # whether a group can only be stepped with all of its gradients

    @property
    def draws(self) -> bool:
        """Whether it draws random numbers in a step."""
        return any(nature.draws for nature in self._natures.values())

    @property
    def undoes_scale(self) -> bool:
        """Whether a GradScaler leaves unscaling to ``step()``.

        With masters, gradients are unscaled after the cast to the masters' dtype.
        """
        return self.fused or self.master_dtype is not None

    def make(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """Returns a plain optimizer of the class and settings over ``groups``."""
        return outside(self.cls, groups, **self._settings)

    def complete(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Fills all defaults into groups, as the class itself does; returns them."""
        filled, optimizer = with_defaults(self.make, groups, self.stepped_dtype)
        self.defaults = optimizer.defaults
        self.eager = bool(optimizer.state)
        self.fused = getattr(optimizer, "_step_supports_amp_scaling", False)
        for group, full in zip(groups, filled, strict=True):
            group.update(full)
        return groups

    def learn(self, groups: Sequence[dict[str, Any]], numbers: Iterable[int]) -> None:
        """Tries the class on groups that have parameters, each once.

        Args:
            groups: All parameter groups.
            numbers: Numbers of those to be tried.

        Raises:
            StepError: If its update of a parameter depends on others.
        """
        new = [n for n in numbers if n not in self._natures and groups[n]["params"]]
        found = {n: self.try_on(groups[n]) for n in new}
        if not hasattr(self, "probe"):
            sparse = any(nature.sparse for nature in found.values())
            self.probe = StateProbe(self.make, self._device, sparse=sparse)
        if self._reorders:
            refuse_draws(self.cls.__name__, list(found.values()))
            refuse_whole(self.cls.__name__, list(found.values()))
        for number, nature in found.items():
            self.counts.add(number, self.make, nature)
        self._natures.update(found)
        self._whole = any(nature.whole for nature in self._natures.values())

    def forget(self, number: int) -> None:
        """Forgets the results for a group that is removed again."""
        self._natures.pop(number, None)
        self.counts.forget(number)

    def note_settings(self, units: Iterable[StepUnit], groups: Sequence[dict[str, Any]]) -> None:
        """Notes before a step which settings are zero, on which the written tensors depend.

        Args:
            units: All units of the optimizer.
            groups: All parameter groups.
        """
        zeros = [zeros_of(settings_of(group)) for group in groups]
        if zeros != self._zeros:
            note_spoils(units, groups, self.probe)
            self._zeros = zeros

    def refuse_missing(self, groups: Sequence[dict[str, Any]]) -> None:
        """Refuses a step without a gradient if the class would update the parameter anyway.

        Args:
            groups: All parameter groups.

        Raises:
            StepError: Naming a parameter that has no gradient.
        """
        if self._whole:
            refuse_missing(self.cls.__name__, groups, self._natures)

    def ignores_weights(self, param: torch.Tensor, number: int, settings: dict[str, Any]) -> bool:
        """Whether the update of a parameter's state does not depend on its weights.

        Only for torch's own classes: for another one, a trial may not show all of its code paths.

        Args:
            param: The stepped tensor.
            number: Number of its group.
            settings: Settings of the group.
        """
        return is_own_class(self.cls) and self.probe.ignores_weights(param, number, settings)

    def try_on(self, group: dict[str, Any], what: str = "", method: Any = None) -> Nature:
        """Tries the class, or a method of it, with the settings of a group.

        Args:
            group: The group, with parameters.
            what: Name for messages; empty for the class's name.
            method: Called on the optimizer instead of ``step()``; None for ``step()``.

        Raises:
            StepError: If its update of a parameter depends on others.
        """
        return check_separable(
            what or self.cls.__name__,
            self.make,
            settings_of(group),
            sorted({p.dim() for p in group["params"]}),
            self._stepped_dtypes(group["params"]),
            self._device,
            method,
        )

    def _stepped_dtypes(self, params: Sequence[torch.Tensor]) -> list[torch.dtype]:
        """Returns the dtypes of the stepped tensors, in the order of the parameters.

        Frozen parameters only count if there are no others, and may have any dtype.
        """
        trained = [p for p in params if p.requires_grad]
        frozen = [p for p in params if p.dtype.is_floating_point and p.dtype.itemsize > 1]
        found = [self.stepped_dtype(p) for p in trained or frozen[:1]]
        return list(dict.fromkeys(found)) or [torch.float32]

    def stepped_dtype(self, param: torch.Tensor) -> torch.dtype:
        """Returns the dtype of the stepped tensor: the parameter, or its master."""
        return master_dtype_of(param, self.master_dtype) or param.dtype
