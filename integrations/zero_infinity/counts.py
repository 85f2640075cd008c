"""The progress of a run, in the numbers that DeepSpeed counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Counts:
    """Steps and samples so far.

    Attributes:
        steps: Steps, including the skipped ones.
        skipped: Steps that were skipped.
        samples: Samples of all steps.
        calls: Calls of ``step()``.
        backwards: Backwards since the last step.
        applied: Whether the last ``step()`` changed the weights.
    """

    steps: int = 0
    skipped: int = 0
    samples: int = 0
    calls: int = 0
    backwards: int = 0
    applied: bool = False

    def count_step(self, samples: int) -> None:
        """Counts a step that was performed or skipped.

        Args:
            samples: The samples of the step.
        """
        self.steps += 1
        self.backwards = 0
        self.samples += samples
        self.skipped += not self.applied
