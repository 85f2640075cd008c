"""Every operation of a save on the file system, in one place: tests replace it with a double."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import os
import stat
from collections.abc import Callable
from contextlib import suppress

_AT_FDCWD = -100
_EXCHANGE = 2  # RENAME_EXCHANGE, see renameat2(2)
_UNSUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)
_opened: set[int] = set()


def _forked() -> None:
    """Closes files that a save of the parent has open, which would stay on the disk, locked."""
    while _opened:
        with suppress(OSError):
            os.close(_opened.pop())


os.register_at_fork(after_in_child=_forked)


class FileOperations:
    """The system's own calls; each raises :class:`OSError` as they do."""

    def make_folder(self, path: str) -> None:
        """Creates a folder."""
        os.mkdir(path)

    def open(self, path: str, flags: int) -> int:
        """Opens a file; returns its descriptor."""
        fd = os.open(path, flags | os.O_CLOEXEC, 0o666)
        _opened.add(fd)
        return fd

    def close(self, fd: int) -> None:
        """Closes a descriptor."""
        # first: if a fork happens in between, a child must not close a reused number
        _opened.discard(fd)
        os.close(fd)

    def reserve(self, fd: int, nbytes: int) -> None:
        """Gives a new file its size, and reserves its space if the file system can."""
        if nbytes and (fallocate := _libc_call("fallocate")) is not None:
            try:
                _checked(fallocate(fd, 0, ctypes.c_long(0), ctypes.c_long(nbytes)))
            except OSError as error:
                if error.errno not in _UNSUPPORTED:
                    raise
        os.ftruncate(fd, nbytes)

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        """Writes bytes at an offset; returns how many were written, which may be fewer."""
        return os.pwrite(fd, data, offset)

    def sync(self, fd: int) -> None:
        """Syncs a file or a folder to the disk (``fsync``)."""
        os.fsync(fd)

    def lock(self, fd: int) -> bool:
        """Marks a folder as in use until its descriptor is closed; returns whether it was free."""
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:  # a file system without locks: other processes are not noticed
            return error.errno in (*_UNSUPPORTED, errno.ENOLCK)
        return True

    def rename(self, source: str, target: str) -> None:
        """Gives a file or folder another name, in place of a file or an empty folder there."""
        os.rename(source, target)

    def exchange(self, first: str, second: str) -> bool:
        """Exchanges two names atomically.

        Returns:
            Whether the file system can; otherwise nothing is changed.
        """
        renameat2 = _libc_call("renameat2")
        if renameat2 is None:
            return False
        names = os.fsencode(first), os.fsencode(second)
        try:
            _checked(renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _EXCHANGE))
        except OSError as error:
            if error.errno in _UNSUPPORTED:
                return False
            raise
        return True

    def link(self, source: str, target: str) -> None:
        """Gives a file, or a symbolic link itself, a second name."""
        os.link(source, target, follow_symlinks=False)

    def give_access(self, fd: int, group: int, mode: int) -> None:
        """Gives a folder a group, if this user may, and permissions."""
        found = os.fstat(fd)
        if group != found.st_gid:
            with suppress(PermissionError):
                os.fchown(fd, -1, group)
        if mode != stat.S_IMODE(found.st_mode):
            os.fchmod(fd, mode)

    def remove_file(self, path: str) -> None:
        """Removes a file."""
        os.unlink(path)

    def remove_folder(self, path: str) -> None:
        """Removes an empty folder."""
        os.rmdir(path)

    def free_bytes(self, path: str) -> int:
        """Returns the bytes that a user may still write to the file system of a folder."""
        found = os.statvfs(path)
        return found.f_bavail * found.f_frsize


def sync_folder(files: FileOperations, path: str) -> None:
    """Syncs a folder, so that the names in it are on the disk."""
    fd = files.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        files.sync(fd)
    finally:
        files.close(fd)


def write_all(files: FileOperations, fd: int, data: memoryview, offset: int) -> None:
    """Writes all bytes at an offset, however often the system writes only a part.

    Raises:
        OSError: If it writes no byte, or fails.
    """
    while data.nbytes:
        done = files.write(fd, data, offset)
        if done <= 0:
            raise OSError(errno.EIO, "the system wrote no byte and named no error")
        data, offset = data[done:], offset + done


@functools.cache
def _libc_call(name: str) -> Callable[..., int] | None:
    """Returns a call of the C library, or None if it has none of this name."""
    try:
        found: Callable[..., int] = getattr(ctypes.CDLL(None, use_errno=True), name)
    except (OSError, AttributeError):
        return None
    return found


def _checked(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
