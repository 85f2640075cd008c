"""A checkpoint's folder: created beside the former one, exchanged atomically, and recovered.

A save writes to ``.NAME.tiermem-XXXX`` beside ``NAME``. Its manifest, ``tiermem.json``, is written
first, says "unfinished", and is replaced by the real one when all else is on the disk. Then the two
names are exchanged in one operation of the file system, so that at any instant ``NAME`` is the
former checkpoint or the new one. If the file system cannot exchange names, the former one is
renamed first: for an instant there is no ``NAME``, and the next load or save finds both beside
it and restores the name. A folder that is being written is locked (``flock``), so that no
process mistakes it for a leftover.
"""

from __future__ import annotations

import errno
import functools
import json
import os
import re
import secrets
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from tiermem.config import format_size
from tiermem.errors import CapacityError, CheckpointError, StorageError
from tiermem.saving.companions import refused, take_over, take_over_folders, walk
from tiermem.saving.files import FileOperations, sync_folder, write_all

MANIFEST = "tiermem.json"
FORMAT = "tiermem checkpoint"
VERSION = 1
_UNFINISHED = json.dumps({"format": FORMAT, "unfinished": True}).encode()
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_MOST_MANIFEST = 1 << 30


@contextmanager
def told_of(path: str, what: str) -> Iterator[None]:
    """Converts ``OSError`` to tiermem's errors, with the operation and the path.

    Raises:
        CapacityError: If there is no room.
        StorageError: For any other error.
    """
    try:
        yield
    except (StorageError, CapacityError):
        raise
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise CapacityError(
                f"{what} {path}: the file system has no room left ({error.strerror}); the former "
                "checkpoint, if there was one, is untouched, and nothing of the new one was left",
                "free space there, or save elsewhere",
            ) from error
        raise StorageError(what, kind="checkpoint", path=path, errno=error.errno) from error


def manifest_of(folder: str, directory: int | None = None) -> dict[str, Any] | None:
    """Returns the manifest of a finished checkpoint, None if a folder has none.

    Args:
        folder: Its path.
        directory: The folder, if it is open: the path may lead to another one meanwhile.

    Raises:
        OSError: If it cannot be read.
    """
    path = MANIFEST if directory is not None else os.path.join(folder, MANIFEST)
    opener = functools.partial(os.open, dir_fd=directory)
    try:
        with open(path, "rb", opener=opener) as file:
            text = file.read(_MOST_MANIFEST)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    ours = isinstance(found, dict) and found.get("format") == FORMAT
    return found if ours and not found.get("unfinished") else None


class CheckpointFolder:
    """The place of a checkpoint.

    Attributes:
        path: The folder, links followed.
    """

    def __init__(self, path: str, files: FileOperations) -> None:
        """Stores the path; nothing is read yet.

        Args:
            path: The path of the checkpoint, which may not exist yet.
            files: The file system.

        Raises:
            CheckpointError: If it is relative to a folder that no longer exists.
        """
        try:
            self.path = os.path.realpath(path)
        except FileNotFoundError:
            raise CheckpointError(
                f"{path!r} is relative to the working folder, which has been removed; give the "
                "whole path, or change to another folder"
            ) from None
        self._files = files
        self._parent, self._name = os.path.split(self.path)
        self._beside = re.compile(re.escape(f".{self._name}.tiermem-") + "[0-9a-f]{8}")
        self._exchanged = False

    # -- before ----------------------------------------------------------

    def check(self) -> None:
        """Raises if the path holds something other than a checkpoint.

        Raises:
            CheckpointError: Unless it is a checkpoint, with or without files of the
                user's own, a folder with files that belong beside weights, or an empty one.
        """
        if not self._name or not os.path.isdir(self._parent):
            raise CheckpointError(
                f"a checkpoint cannot be saved to {self.path}: there is no folder {self._parent}; "
                "make it first, or correct the path"
            )
        if not os.path.lexists(self.path):
            return
        if not os.path.isdir(self.path):
            raise CheckpointError(
                f"{self.path} is a file, not a checkpoint; nothing was written: save to a path "
                "where there is nothing, or a checkpoint"
            )
        is_checkpoint = manifest_of(self.path) is not None
        foreign = refused(self.foreign(), is_checkpoint)
        if foreign:
            why = "which tiermem did not save there" if is_checkpoint else "and no checkpoint"
            raise CheckpointError(
                f"{self.path} is a folder with {foreign[0]!r} in it, {why}; nothing was written: "
                "move it, or save elsewhere"
            )

    def foreign(self) -> list[str]:
        """Returns what is in the folder and not in its manifest: the user's own files."""
        if not os.path.isdir(self.path):
            return []
        manifest = manifest_of(self.path)
        ours = set() if manifest is None else {MANIFEST, *manifest.get("files", ())}
        return [name for name in sorted(walk(self.path)) if name not in ours]

    def check_room(self, nbytes: int) -> None:
        """Refuses a size for which the file system has no room beside the former checkpoint.

        Raises:
            CapacityError: If so, with both sizes.
        """
        free = self._files.free_bytes(self._parent)
        if nbytes > free:
            raise CapacityError(
                f"the checkpoint {self.path} takes {format_size(nbytes)}, and the file system of "
                f"{self._parent} has {format_size(free)} free beside the former one, which stays "
                "until the new one is whole; nothing was written",
                "free space there, or save elsewhere",
            )

    # -- what a crash has left -------------------------------------------

    def recover(self) -> None:
        """Restores the name of a finished checkpoint, if a crash has left none of that name.

        Raises:
            OSError: If this fails.
        """
        if os.path.lexists(self.path):
            return
        finished = [(m.get("number", 0), path) for path in self._left() if (m := manifest_of(path))]
        for _, path in sorted(finished, reverse=True):
            if self._is_free(path):
                self._files.rename(path, self.path)
                sync_folder(self._files, self._parent)
                return

    def clean(self) -> None:
        """Removes what killed saves of this checkpoint have left beside it.

        Raises:
            OSError: If this fails.
        """
        for path in self._left():
            if self._is_free(path) and _is_ours(path):
                self._remove(path)

    def _left(self) -> list[str]:
        """Returns the folders beside it that its saves create."""
        if not os.path.isdir(self._parent):
            return []
        names = sorted(name for name in os.listdir(self._parent) if self._beside.fullmatch(name))
        paths = [os.path.join(self._parent, name) for name in names]
        return [path for path in paths if stat.S_ISDIR(os.lstat(path).st_mode)]

    def _is_free(self, path: str) -> bool:
        """Whether no process is writing a folder at the moment."""
        try:
            fd = self._files.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            return False
        try:
            return self._files.lock(fd)
        finally:
            self._files.close(fd)

    # -- a new one -------------------------------------------------------

    @contextmanager
    def replacing(self, folders: Sequence[str]) -> Iterator[str]:
        """Yields a folder beside the checkpoint, which takes its place at the end.

        An exception inside leaves the former checkpoint, and nothing else.

        Args:
            folders: Subfolders to be created in it.

        Raises:
            OSError: If the file system fails.
        """
        self.recover()
        self.clean()
        self._exchanged = False
        temporary = os.path.join(self._parent, f".{self._name}.tiermem-{secrets.token_hex(4)}")
        self._files.make_folder(temporary)
        fd = -1
        try:
            fd = self._files.open(temporary, os.O_RDONLY | os.O_DIRECTORY)
            self._files.lock(fd)
            self._give_access(fd)
            self.write(temporary, MANIFEST, _UNFINISHED)
            for name in folders:
                self._files.make_folder(os.path.join(temporary, name))
            yield temporary
            for name in folders:
                sync_folder(self._files, os.path.join(temporary, name))
            take_over(self._files, self.foreign(), self.path, temporary)
            take_over_folders(self._files, self.path, temporary)
            self._files.sync(fd)
            self._publish(temporary)
        except BaseException:
            if not self._exchanged:  # otherwise it is the former one: the next save removes it
                with suppress(OSError):
                    self._remove(temporary)
            raise
        finally:
            if fd >= 0:
                self._files.close(fd)

    def _give_access(self, fd: int) -> None:
        """Gives the new folder the former one's permissions, so that it stays private."""
        with suppress(FileNotFoundError):
            former = os.stat(self.path)
            mode = stat.S_IMODE(former.st_mode) | stat.S_IRWXU  # it must be writable
            self._files.give_access(fd, former.st_gid, mode)

    def write(self, folder: str, name: str, data: bytes) -> None:
        """Writes a small file and syncs it to the disk.

        Raises:
            OSError: If that fails.
        """
        fd = self._files.open(os.path.join(folder, name), os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            write_all(self._files, fd, memoryview(data), 0)
            self._files.sync(fd)
        finally:
            self._files.close(fd)

    def write_manifest(self, folder: str, data: bytes) -> None:
        """Replaces the manifest that says "unfinished" with the real one.

        Raises:
            OSError: If that fails.
        """
        self.write(folder, f"{MANIFEST}.new", data)
        target = os.path.join(folder, MANIFEST)
        self._files.rename(f"{target}.new", target)

    def _publish(self, temporary: str) -> None:
        """Gives the new folder the name; removes the former one."""
        here = _working_folder()
        if not os.path.lexists(self.path) or not os.listdir(self.path):
            self._files.rename(temporary, self.path)  # nothing, or an empty folder
            self._exchanged = True
            self._stay(here)
            sync_folder(self._files, self._parent)
            return
        former = temporary
        if not self._files.exchange(temporary, self.path):
            former = os.path.join(self._parent, f".{self._name}.tiermem-{secrets.token_hex(4)}")
            self._files.rename(self.path, former)
            try:
                self._files.rename(temporary, self.path)
            except BaseException:
                self._files.rename(former, self.path)
                raise
        self._exchanged = True
        self._stay(here)
        sync_folder(self._files, self._parent)
        with suppress(OSError):  # the new one is in place; the next save tries this again
            late = CheckpointFolder(former, self._files).foreign()
            take_over(self._files, late, former, self.path)  # files put there in the meantime
            self._remove(former)

    def _stay(self, here: str) -> None:
        """Keeps a program's working folder, by name, if it is in the removed former folder.

        Args:
            here: Its working folder before.
        """
        if f"{here}/".startswith(f"{self.path}/"):
            for folder in (here, self.path):
                with suppress(OSError):
                    os.chdir(folder)
                    return

    def _remove(self, folder: str) -> None:
        """Removes a folder that tiermem created; its manifest is removed last."""
        names = sorted(walk(folder))
        for name in [name for name in names if name != MANIFEST]:
            self._files.remove_file(os.path.join(folder, name))
        inside = [where for where, _, _ in os.walk(folder, topdown=False) if where != folder]
        for where in inside:
            self._files.remove_folder(where)
        if MANIFEST in names:
            self._files.remove_file(os.path.join(folder, MANIFEST))
        self._files.remove_folder(folder)


def _working_folder() -> str:
    """Returns the program's working folder; empty if it has been removed."""
    try:
        return os.getcwd()
    except OSError:
        return ""


def _is_ours(folder: str) -> bool:
    """Whether a folder is empty, or has the marker of a save, even a partly written one."""
    names = os.listdir(folder)
    if MANIFEST not in names:
        return not names
    with open(os.path.join(folder, MANIFEST), "rb") as file:
        text = file.read(_MOST_MANIFEST)
    return FORMAT.encode() in text or (len(names) == 1 and len(text) <= len(_UNFINISHED))
