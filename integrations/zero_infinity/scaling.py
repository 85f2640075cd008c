"""The scale of a float16 loss, raised and lowered by DeepSpeed's rules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tiermem import StepError

from .reading import Config


@dataclass
class LossScale:
    """A scale, dynamic or not.

    Attributes:
        scale: What the loss is multiplied by.
        dynamic: Whether overflows lower it and their absence raises it.
        window: Steps without an overflow after which it is doubled.
        least: The lowest scale.
        hysteresis: How many overflows there may be before it is halved.
        consecutive: Whether a step without an overflow restores the hysteresis.
        ends: Whether an overflow at the least scale ends the run.
    """

    scale: float = 1.0
    dynamic: bool = False
    window: float = 1000
    least: float = 1.0
    hysteresis: int = 1
    consecutive: bool = False
    ends: bool = False

    def __post_init__(self) -> None:
        self._iteration = 0
        self._last_overflow = -1
        self._left = self.hysteresis

    @classmethod
    def of(cls, config: Config) -> LossScale | None:
        """Returns the scale of a configuration, or None if nothing is float16.

        Without ZeRO, DeepSpeed has no hysteresis, and overflows never end the run.
        """
        if not config["fp16.enabled"]:
            return None
        if config["fp16.loss_scale"]:
            return cls(float(config["fp16.loss_scale"]))
        zero = config["zero_optimization.stage"] > 0
        return cls(
            2.0 ** config["fp16.initial_scale_power"],
            True,
            config["fp16.loss_scale_window"],
            float(config["fp16.min_loss_scale"]),
            config["fp16.hysteresis"] if zero else 1,
            config["fp16.consecutive_hysteresis"] and zero,
            zero,
        )

    def update(self, overflow: bool) -> None:
        """Updates the scale after a step.

        Args:
            overflow: Whether a gradient was infinite or NaN.

        Raises:
            StepError: If the scale cannot be lowered any more.
        """
        if self.dynamic and overflow:
            self._lower()
        elif self.dynamic:
            self._raise()
        self._iteration += 1

    def _lower(self) -> None:
        if self.hysteresis > 1 and self._left > 1:
            self._left -= 1
        elif self.scale == self.least and self.ends:
            raise StepError(
                f"a gradient is infinite or NaN although the loss scale is at fp16.min_loss_scale="
                f"{self.least:g}; the run diverges: use a lower learning rate, or bf16"
            )
        else:
            self.scale = max(self.scale / 2, self.least)
        self._last_overflow = self._iteration

    def _raise(self) -> None:
        if self.consecutive:
            self._left = self.hysteresis
        stable = self._iteration - self._last_overflow - 1
        if stable > 0 and stable % self.window == 0:
            if not self.consecutive:
                self._left = self.hysteresis
            self.scale *= 2

    def state_dict(self) -> dict[str, Any]:
        """Returns what :meth:`load_state_dict` takes."""
        return {
            "scale": self.scale,
            "iteration": self._iteration,
            "last_overflow": self._last_overflow,
            "left": self._left,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a saved state."""
        self.scale = state["scale"]
        self._iteration = state["iteration"]
        self._last_overflow = state["last_overflow"]
        self._left = state["left"]
