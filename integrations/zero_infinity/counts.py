"""How far a run has got, in the numbers that DeepSpeed counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Counts:
    """Steps and samples so far.

    Attributes:
        steps: Steps, those left out with them.
        skipped: Steps that were left out.
        samples: Samples of all of them.
        calls: Calls of ``step()``.
        backwards: Since the last step.
        applied: Whether the last ``step()`` changed the weights.
    """

    steps: int = 0
    skipped: int = 0
    samples: int = 0
    calls: int = 0
    backwards: int = 0
    applied: bool = False

    def count_step(self, samples: int) -> None:
        """Counts a step that was made or left out.

        Args:
            samples: Of the step.
        """
        self.steps += 1
        self.backwards = 0
        self.samples += samples
        self.skipped += not self.applied
