"""Values of a model's tensors in checkpoint files, as wrapping a model asks for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from math import prod
from pathlib import Path

import torch

from tiermem.core.layout import contiguous_stride
from tiermem.errors import CheckpointError, StorageError
from tiermem.loading.sources import Converted, Source, view_of
from tiermem.loading.traced import StoredView
from tiermem.runtime.memory.homes import StoredBlock
from tiermem.storage.checkpoint.folder import CheckpointFiles
from tiermem.storage.checkpointstore import SourceRange


class FileOrigins:
    """Sources of tensors by id.

    Args:
        files: The checkpoint.
        first: Number of the first of its files in the manager.
        sources: Sources by the id of each tensor.
        names: Names by the same id; for messages.
        read: Reads runs of bytes of the files, numbered as in the manager, past the page cache.
        fds: A descriptor of each file, which the manager has open.
    """

    def __init__(
        self,
        files: CheckpointFiles,
        first: int,
        sources: Mapping[int, Source],
        names: Mapping[int, str],
        read: Callable[[Sequence[SourceRange], int], torch.Tensor],
        fds: Sequence[int],
    ) -> None:
        self._files = files
        self._first = first
        self._sources = sources
        self._names = names
        self._read = read
        self._fds = fds
        self._mapped: dict[int, torch.UntypedStorage] = {}

    def stored(self, tensors: Sequence[torch.Tensor]) -> StoredBlock | None:
        """See :class:`tiermem.nn.wrap.origins.Origins`."""
        found: list[list[SourceRange]] = []
        for tensor in tensors:
            source = self._sources.get(id(tensor))
            if not isinstance(source, StoredView) or not _as_it_is(source, tensor):
                return None
            found.append(self._ranges(source))
        return found if any(found) else None

    def value(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """See :class:`tiermem.nn.wrap.origins.Origins`."""
        source = self._sources.get(id(tensor))
        if source is None:
            return None
        if isinstance(source, StoredView):
            return self._read_view(source)
        values = {
            key: [self._read_view(view_of(self._files, name)) for name in names]
            for key, names in source.sources.items()
        }
        made = source.convert(values)
        if made.shape != tensor.shape:
            raise CheckpointError(
                f"{self._files.paths[0].parent}: {self._names[id(tensor)]!r} has shape "
                f"{tuple(made.shape)} when converted and {tuple(tensor.shape)} in the model"
            )
        return made

    def _read_view(self, view: StoredView) -> torch.Tensor:
        flat = self._read(self._ranges(view), view.nbytes)
        return flat.view(view.dtype).reshape(view.shape)

    def _ranges(self, view: StoredView) -> list[SourceRange]:
        """Returns where the files have a tensor's bytes, in order."""
        target, ranges = 0, []
        for run in view.runs:
            ranges.append(SourceRange(self._first + run.file, run.offset, run.nbytes, target))
            target += run.nbytes
        return ranges

    def mapped(self, tensor: torch.Tensor) -> torch.Tensor:
        """See :class:`tiermem.nn.wrap.origins.Origins`.

        Pages are private: writes to the tensor do not change the file.
        """
        source = self._sources[id(tensor)]
        if isinstance(source, Converted):
            raise CheckpointError(f"{self._names[id(tensor)]!r} is not in the files as it is")
        try:
            return self._mapped_in(self._files, source)
        except (CheckpointError, StorageError):
            # a file was removed, or its name was reused: it is still open, and complete
            opened = tuple(Path(f"/proc/self/fd/{fd}") for fd in self._fds)
            with suppress(CheckpointError, StorageError):
                return self._mapped_in(replace(self._files, paths=opened), source)
            raise

    def _mapped_in(self, files: CheckpointFiles, source: StoredView) -> torch.Tensor:
        itemsize = source.dtype.itemsize
        if len(source.runs) != 1 or source.runs[0].offset % itemsize:
            return files.read_view(source.shape, source.dtype, source.runs)
        run = source.runs[0]
        storage = self._mapped.get(run.file)
        if storage is None:
            storage = self._mapped[run.file] = files.map_file(run.file)
        flat = torch.empty(0, dtype=source.dtype, device="cpu")
        stride = contiguous_stride(source.shape)
        return flat.set_(storage, run.offset // itemsize, source.shape, stride)


def _as_it_is(source: StoredView, tensor: torch.Tensor) -> bool:
    """Whether the tensor's bytes are stored in the files unchanged."""
    dense = tensor.is_contiguous() and prod(tensor.shape) * tensor.itemsize == source.nbytes
    return dense and source.dtype is tensor.dtype
