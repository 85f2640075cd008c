"""Where an engine's micro-batches come from."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from tiermem import StepError

from . import utils
from .mapping import Plan


class Batches:
    """Makes loaders of micro-batches, and has the one of ``training_data``.

    Attributes:
        loader: The loader of ``training_data``, or None.
    """

    def __init__(self, plan: Plan, device: torch.device, collate_fn: Any) -> None:
        """Makes no loader yet.

        Args:
            plan: Says how many samples a micro-batch has.
            device: Where batches go.
            collate_fn: What makes a batch of samples; None for torch's.
        """
        self.loader: Any = None
        self._plan = plan
        self._device = device
        self._collate_fn = collate_fn
        self._repeating: utils.RepeatingLoader | None = None

    def repeated(self) -> utils.RepeatingLoader:
        """Returns the loader of ``training_data``, begun anew where it ends.

        Raises:
            StepError: If there is none.
        """
        if self.loader is None:
            raise StepError("train_batch() takes an iterator: there is no training_data")
        if self._repeating is None:
            self._repeating = utils.RepeatingLoader(self.loader)
        return self._repeating

    def loader_of(
        self,
        dataset: Dataset[Any],
        batch_size: int | None,
        *,
        shuffle: bool,
        pin_memory: bool,
        sampler: Any,
        collate_fn: Any,
        workers: int,
    ) -> DataLoader[Any]:
        """Returns a loader of micro-batches.

        Args:
            dataset: What it loads.
            batch_size: Samples of a micro-batch; by default the plan's.
            shuffle: Whether the order is random, where there is no sampler.
            pin_memory: Whether batches are page-locked for a device with CUDA.
            sampler: The order; None for one as DeepSpeed makes for one process.
            collate_fn: What makes a batch of samples; None for the engine's.
            workers: Processes that load.
        """
        if sampler is None and not isinstance(dataset, IterableDataset):
            sampler = DistributedSampler(dataset, 1, 0, shuffle=shuffle)
        return DataLoader(
            dataset,
            batch_size or self._plan.micro,
            sampler=sampler,
            collate_fn=collate_fn or self._collate_fn,
            num_workers=workers,
            pin_memory=pin_memory and self._device.type == "cuda",
            drop_last=self._plan.config["dataloader_drop_last"],
        )
