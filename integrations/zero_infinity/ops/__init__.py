"""``deepspeed.ops``: optimizers by their old places."""

from __future__ import annotations

from . import adam, lamb, lion

__all__ = ["adam", "lamb", "lion"]
