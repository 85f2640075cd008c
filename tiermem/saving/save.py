"""``tier.save``: writes the state of a run beside the former checkpoint, then replaces that."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from tiermem.config import parse_path
from tiermem.errors import CheckpointError
from tiermem.nn.compat.outside import outside
from tiermem.nn.passes.runtime import ModuleRuntime
from tiermem.runtime.base.functorch import outside_inference
from tiermem.saving import layout
from tiermem.saving.contents import Collector
from tiermem.saving.files import FileOperations
from tiermem.saving.folder import FORMAT, VERSION, CheckpointFolder, manifest_of, told_of
from tiermem.saving.layout import FilePlan, index_of, plan_files
from tiermem.saving.names import ModelNames, optimizers_of
from tiermem.saving.rng import generator_states
from tiermem.saving.sources import Source
from tiermem.saving.writer import TensorWriter

FILES = FileOperations()
_ROOM_FOR_MORE = 1 << 20  # for configurations, indexes and the manifest, whose size is small


@dataclass(slots=True, eq=False)
class Plan:
    """Everything to be written.

    Attributes:
        folder: The checkpoint's folder.
        sources: The sources of the tensors, in the order of the files.
        plans: The files of tensors.
        small: Other files, by their path in the checkpoint.
        folders: Folders in the checkpoint.
        manifest: Its contents, except what is known only after the tensors are written.
    """

    folder: CheckpointFolder
    sources: list[Source]
    plans: list[FilePlan]
    small: dict[str, bytes]
    folders: list[str]
    manifest: dict[str, Any]

    @property
    def nbytes(self) -> int:
        """Bytes on the disk, at least."""
        return sum(p.nbytes for p in self.plans) + sum(map(len, self.small.values()))


def make_plan(runtime: ModuleRuntime, path: str | os.PathLike[str], extra: Any) -> Plan:
    """Collects everything, and raises for what cannot be saved, before anything is written.

    Args:
        runtime: The modules' runtime.
        path: Path of the checkpoint.
        extra: The user's own values.

    Raises:
        CheckpointError: With the name of what cannot be saved, or why the path cannot be used.
        CapacityError: If the file system has no room.
        StepError: If an optimizer's step is unfinished.
        StorageError: If the file system cannot be read.
    """
    runtime.models.refuse_half_loaded("tier.save()")
    runtime.refuse_inside("tier.save()")
    runtime.backward.end()
    folder = CheckpointFolder(parse_path(path, "path", CheckpointError), FILES)
    with told_of(folder.path, "a checkpoint cannot be saved to"):
        folder.check()
        kept = folder.foreign()
    collector = Collector(runtime)
    found = [optimizer.contents("tier.save()") for optimizer in optimizers_of(runtime)]
    collector.collect(found, rng=generator_states(runtime.manager.parts.device), extra=extra)
    plans, small = [], {}
    for specs, model in zip(collector.model_specs, collector.models, strict=True):
        metadata = {"format": "pt", **model.aliases}
        made = plan_files(f"{model.folder}model", specs, metadata, layout.SHARD_NBYTES)
        plans += made
        if len(made) > 1:
            small[f"{model.folder}model.safetensors.index.json"] = index_of(made)
        made_of = {model.folder + name: text for name, text in _configurations(model).items()}
        small |= {name: text for name, text in made_of.items() if name not in kept}
    plans += plan_files("optimizer", collector.specs, {"format": "pt"}, layout.SHARD_NBYTES)
    folders = [model.folder.rstrip("/") for model in collector.models if model.folder]
    plan = Plan(folder, collector.sources, plans, small, folders, collector.manifest)
    with told_of(folder.path, "a checkpoint cannot be saved to"):
        folder.check_room(plan.nbytes + _ROOM_FOR_MORE)
    return plan


def _configurations(model: ModelNames) -> dict[str, bytes]:
    """Returns the files that transformers' ``from_pretrained`` needs beside weights."""
    found = {}
    for attribute, name in (("config", "config.json"), ("generation_config", None)):
        value = getattr(model.wrapped.model, attribute, None)
        write = getattr(value, "to_json_string", None)
        if callable(write):
            text = outside(write)
            if isinstance(text, str):
                found[name or f"{attribute}.json"] = _with_architecture(text, model).encode()
    return found


def _with_architecture(text: str, model: ModelNames) -> str:
    """Names the class in a configuration, as ``save_pretrained`` does."""
    with suppress(ValueError):
        values = json.loads(text)
        if isinstance(values, dict) and "architectures" in values and not values["architectures"]:
            values["architectures"] = [type(model.wrapped.model).__name__]
            return json.dumps(values, indent=2, sort_keys=True) + "\n"
    return text


def save_now(runtime: ModuleRuntime, plan: Plan) -> None:
    """Writes a checkpoint, tensor by tensor from its present place.

    Raises:
        CapacityError: If the file system has no room.
        StorageError: If it fails, or a block cannot be read. The former checkpoint is unchanged.
    """
    with writing(plan) as writer:
        for source in plan.sources:
            write_source(runtime, source, writer)


def write_source(runtime: ModuleRuntime, source: Source, writer: TensorWriter) -> None:
    """Writes the tensors of a source."""
    manager = runtime.manager
    with manager.lock, outside_inference(), torch.no_grad():
        manager.gate.guard()
        for key, begin, tensor in source.runs():
            writer.put(key, begin, tensor)


@contextmanager
def writing(plan: Plan) -> Iterator[TensorWriter]:
    """Yields the tensor writer; at the end, the checkpoint replaces the former one.

    Raises:
        CapacityError: If the file system has no room.
        StorageError: If it fails.
    """
    folder, files = plan.folder, FILES
    with told_of(folder.path, "a checkpoint could not be written to"):
        with folder.replacing(plan.folders) as temporary:
            for name, data in plan.small.items():
                folder.write(temporary, name, data)
            writer = TensorWriter(files, temporary, plan.plans)
            try:
                yield writer
                checks = writer.finish()
            finally:
                writer.close()
            former = manifest_of(folder.path)
            number = former.get("number", 0) + 1 if former is not None else 1
            described = {p.path: _described(p.nbytes, p.header) for p in plan.plans}
            described |= {name: _described(len(d), d) for name, d in plan.small.items()}
            folder.write_manifest(
                temporary,
                sealed(
                    {
                        "format": FORMAT,
                        "version": VERSION,
                        "number": number,
                        "torch": torch.__version__,
                        "files": described,
                        **plan.manifest,
                        "checks": checks,
                    }
                ),
            )


def _described(nbytes: int, begin: bytes) -> dict[str, Any]:
    """Returns the length of a file, and length and checksum of its beginning."""
    digest = xxhash.xxh3_64_hexdigest(begin)
    return {"nbytes": nbytes, "begin": [len(begin), digest]}


def sealed(manifest: dict[str, Any]) -> bytes:
    """Returns the text of a manifest, with a checksum of all of it."""
    text = json.dumps(manifest, separators=(",", ":"))
    return json.dumps({**manifest, "seal": seal_of(text)}, separators=(",", ":")).encode()


def seal_of(text: str) -> str:
    """Returns the checksum of a manifest's text without the seal itself."""
    return str(xxhash.xxh3_64_hexdigest(text.encode()))
