"""``tiermem train --save DIR --save-every N --resume``: checkpoints of the tiered run."""

from __future__ import annotations

import os
import tempfile
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from tiermem.cli.training import Progress, Settings
from tiermem.errors import ConfigError
from tiermem.saving.later import SaveHandle
from tiermem.tier import TierManager


@dataclass(frozen=True)
class Saving:
    """The options ``--save``, ``--save-every`` and ``--resume``.

    Attributes:
        path: Where checkpoints go.
        every: Steps from one to the next; 0 for one at the end alone.
        resume: Whether to go on from the one that is there.
    """

    path: str
    every: int = 0
    resume: bool = False


def read_saving(path: str | None, every: int | None, resume: bool) -> Saving | None:
    """Checks the options; returns None where nothing is to be saved.

    The folder that a checkpoint is to lie in is made if need be, and tried.

    Raises:
        CheckpointError: If a checkpoint cannot be saved there.
        ConfigError: If they do not go together.
        StorageError: If the file system does not let it be.
    """
    from tiermem.saving.folder import CheckpointFolder, told_of
    from tiermem.saving.save import FILES

    if path is None:
        if every is not None or resume:
            option = "--save-every" if every is not None else "--resume"
            raise ConfigError(f"{option} needs --save DIR, the checkpoint that it is about")
        return None
    if every is not None and every < 1:
        raise ConfigError(f"--save-every must be at least 1, not {every}")
    folder = CheckpointFolder(path, FILES)
    with told_of(folder.path, "a checkpoint cannot be saved to"):
        parent = os.path.dirname(folder.path)
        os.makedirs(parent, exist_ok=True)
        folder.recover()  # else --resume would begin anew where a crash has left it beside its name
        folder.check()  # before the work that it is to keep
        with tempfile.TemporaryFile(dir=parent):  # where every save makes a folder
            pass
    return Saving(path, every or 0, resume)


class Checkpoints:
    """Saves a run as it goes, and resumes it; one for each run."""

    def __init__(
        self,
        tier: TierManager,
        saving: Saving,
        described: dict[str, Any],
        base: dict[str, Any] | None = None,
    ) -> None:
        """Saves nothing yet.

        Args:
            tier: The tiers, with model and optimizer.
            saving: What was asked for.
            described: What the run is about; one that goes on has the same.
            base: What is to be known of the model that adapters are on.
        """
        self._tier = tier
        self._saving = saving
        self._described = described
        self._base = base
        self._under_way: SaveHandle | None = None

    def resume(self, progress: Progress, scheduler: Any, generator: torch.Generator) -> None:
        """Goes on where the checkpoint was saved, if that is asked for and there is one.

        Raises:
            ConfigError: If it is of a run with other settings.
            CheckpointError: If it is no checkpoint.
        """
        if not self._saving.resume or not os.path.lexists(self._saving.path):
            return
        extra = self._tier.load(self._saving.path)
        check_settings(self._saving.path, extra, self._described)
        progress.losses[:] = extra["losses"]
        scheduler.load_state_dict(extra["scheduler"])
        generator.set_state(extra["generator"])

    def after(
        self,
        step: int,
        last: bool,
        optimizer: torch.optim.Optimizer,
        progress: Progress,
        scheduler: Any,
        generator: torch.Generator,
    ) -> None:
        """Saves if it is time to; training goes on meanwhile, but for the last time.

        Args:
            step: How many are made.
            last: Whether there is none to come.
            optimizer: Its gradients are used up, and not saved.
            progress: The losses.
            scheduler: Of the learning rate.
            generator: Draws the batches.
        """
        every = self._saving.every
        if not last and not (every and step % every == 0):
            return
        optimizer.zero_grad(set_to_none=True)
        extra = {
            "settings": self._described,
            "base": self._base,
            "losses": list(progress.losses),
            "scheduler": scheduler.state_dict(),
            "generator": generator.get_state(),
        }
        self._under_way = self._tier.save(self._saving.path, extra, wait=False)
        if last and self._under_way is not None:
            self._under_way.result()


def describe(settings: Settings) -> dict[str, Any]:
    """Returns what two parts of one run have to have in common."""
    kept = asdict(replace(settings, optimizer_on="device"))
    kept |= {name: str(kept[name]) for name in ("dtype", "master")}
    if not settings.rounds_alike:
        kept["optimizer_on"] = settings.optimizer_on  # it rounds differently
    del kept["device"], kept["overlap"]
    return kept


def check_settings(path: str, extra: Any, described: dict[str, Any]) -> None:
    """Refuses to go on with a run of other settings.

    Raises:
        ConfigError: Naming the first that differs.
    """
    saved = extra.get("settings") if isinstance(extra, dict) else None
    if not isinstance(saved, dict):
        raise ConfigError(f"--resume: {path} was not saved by tiermem train")
    for name, value in described.items():
        if saved.get(name) != value:
            raise ConfigError(
                f"--resume: {path} is of a run with {name} {saved.get(name)!r}, and this one has "
                f"{value!r}; give the same options, or another --save"
            )
