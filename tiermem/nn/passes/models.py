"""The wrapped models of one manager, and what is half done with them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tiermem.errors import CheckpointError

if TYPE_CHECKING:
    from tiermem.nn.wrap.materialize import Lending
    from tiermem.nn.wrap.wrapped import WrappedModel


class Models(dict[int, "WrappedModel"]):
    """The wrapped models, by the id of their module.

    Attributes:
        wrapping: The one that is being wrapped.
        lendings: What users have as ordinary tensors, and what could not be taken back from them.
        half_loaded: The error of a checkpoint that was loaded in part; empty where none was.
        owner: The manager that users see, kept alive as long as models are wrapped.
    """

    def __init__(self) -> None:
        """Starts without any."""
        super().__init__()
        self.wrapping: WrappedModel | None = None
        self.lendings: list[Lending] = []
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
