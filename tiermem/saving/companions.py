"""The user's own files in a checkpoint's folder: which are kept, and how.

Users who put ``config.json`` and the tokenizer beside weights can load the folder with
transformers, and expect to find these files there after the next save. A save creates a new folder,
so they get second names (hard links) there before the folders are exchanged, so that they exist at
any instant. On a file system without hard links they are copied.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator, Sequence

from tiermem.saving.files import FileOperations, sync_folder, write_all

_BESIDE_WEIGHTS = re.compile(
    r"(generation_|adapter_)?config\.json|.*tokenizer.*|special_tokens_map\.json|"
    r"added_tokens\.json|vocab\b.*|merges\.txt|.*\.(model|jinja|py|md)|chat_template.*|"
    r".*processor.*\.json|(README|LICENSE|NOTICE|USE_POLICY)\b.*|\.git(attributes|ignore)"
)
"""Names of files that other code puts beside weights, in a folder for a checkpoint."""
_OF_A_CHECKPOINT = re.compile(
    r"(model-\d+/)?(model|optimizer)\b.*\.safetensors(\.index\.json)?|tiermem\.json.*"
)
"""Names that readers would take for a part of the checkpoint."""
_NO_LINKS = (errno.EPERM, errno.EXDEV, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS)
_PART = 1 << 20


def refused(names: Sequence[str], is_checkpoint: bool) -> list[str]:
    """Returns those of the user's files that a checkpoint cannot be saved beside.

    Args:
        names: Files that do not belong to a checkpoint, by their path in the folder.
        is_checkpoint: Whether the folder has a checkpoint. If not, it may be any folder, and only
            files that belong beside weights show that it is meant for one.
    """
    if is_checkpoint:
        return [name for name in names if _OF_A_CHECKPOINT.fullmatch(name)]
    return [name for name in names if not _BESIDE_WEIGHTS.fullmatch(name)]


def walk(folder: str) -> Iterator[str]:
    """Yields the files in a folder and its subfolders, by their path in it; links as files."""
    for where, folders, names in os.walk(folder):
        below = os.path.relpath(where, folder)
        links = [name for name in folders if os.path.islink(os.path.join(where, name))]
        for name in [*names, *links]:
            yield name if below == "." else os.path.join(below, name)


def take_over(files: FileOperations, names: Sequence[str], source: str, target: str) -> None:
    """Gives files of one folder the same names in another, and syncs them to the disk.

    Args:
        files: The file system.
        names: Paths in both folders.
        source: The folder that has them.
        target: The other; files that exist there are kept.

    Raises:
        OSError: If the file system fails.
    """
    changed: set[str] = set()
    for name in names:
        to = os.path.join(target, name)
        if os.path.lexists(to):
            continue
        changed |= _make_folders(files, target, os.path.dirname(name))
        _link(files, os.path.join(source, name), to)
        changed.add(os.path.dirname(to))
    for folder in sorted(changed, reverse=True):
        sync_folder(files, folder)


def take_over_folders(files: FileOperations, source: str, target: str) -> None:
    """Creates the empty folders of one folder in another, as files may be written there later.

    Raises:
        OSError: If the file system fails.
    """
    for where, folders, names in os.walk(source):
        if where != source and not folders and not names:
            for changed in _make_folders(files, target, os.path.relpath(where, source)):
                sync_folder(files, changed)


def _make_folders(files: FileOperations, root: str, below: str) -> set[str]:
    """Creates a folder in ``root``, and those above it; returns the folders that changed."""
    if not below or os.path.isdir(os.path.join(root, below)):
        return set()
    changed = _make_folders(files, root, os.path.dirname(below))
    files.make_folder(os.path.join(root, below))
    return changed | {os.path.dirname(os.path.join(root, below))}


def _link(files: FileOperations, source: str, target: str) -> None:
    try:
        files.link(source, target)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        _copy(files, source, target)


def _copy(files: FileOperations, source: str, target: str) -> None:
    if os.path.islink(source):
        os.symlink(os.readlink(source), target)
        return
    fd = files.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        with open(source, "rb") as file:
            while part := file.read(_PART):
                write_all(files, fd, memoryview(part), file.tell() - len(part))
            os.fchmod(fd, os.fstat(file.fileno()).st_mode & 0o777)
        files.sync(fd)
    finally:
        files.close(fd)
