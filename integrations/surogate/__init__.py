"""Surogate's offloading options on any torch model.

    from tiermem.integrations import surogate

    with surogate.Offloading(model, "train.yaml") as run:
        optimizer = run.optimizer()
        ...
        loss.backward()
        run.step(optimizer)

Options come from an unchanged YAML file of Surogate's, from a mapping, or by name. Each does what
Surogate's pages say for one GPU, or is refused or reported; :func:`explain` says which. Options
that need several GPUs or quantized copies are refused so far.
"""

from __future__ import annotations

from .normuon import NorMuon
from .offloading import Offloading, explain
from .options import OPTIONS, Options

__all__ = ["OPTIONS", "NorMuon", "Offloading", "Options", "explain"]
