"""The wrapped models of one manager, and unfinished operations on them."""

from __future__ import annotations

from typing import Any

from tiermem.errors import CheckpointError


class Models(dict[int, Any]):
    """The wrapped models, by the id of their module.

    Passes only store them for the package above, which has their classes.

    Attributes:
        wrapping: The one that is being wrapped, or None.
        lendings: Tensors that users have materialized, or whose changes could not be written back.
        half_loaded: The error about a checkpoint that was loaded only in part; else empty.
        owner: The manager that users see, kept alive as long as models are wrapped.
    """

    def __init__(self) -> None:
        """Starts without any."""
        super().__init__()
        self.wrapping: Any = None
        self.lendings: list[Any] = []
        self.half_loaded = ""
        self.owner: object = None

    def refuse_half_loaded(self, what: str) -> None:
        """Refuses to compute with a checkpoint of which only a part was loaded.

        Raises:
            CheckpointError: If that is so.
        """
        if self.half_loaded:
            raise CheckpointError(
                f"{what} with a checkpoint that was loaded in part: {self.half_loaded}; weights "
                "and state are partly its own and partly those of before: load a whole "
                "checkpoint with tier.load(path)"
            )
