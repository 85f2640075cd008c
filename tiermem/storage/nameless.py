"""Files without a name: opens them, sets direct I/O, reserves their space."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import stat
import struct
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tiermem.core.block import ALIGNMENT
from tiermem.errors import ConfigError

_STATX_DIOALIGN = 0x2000
_AT_EMPTY_PATH = 0x1000
_STATX_NBYTES = 256
_GET_FLAGS, _SET_FLAGS = 0x80086601, 0x40086602  # FS_IOC_GETFLAGS, FS_IOC_SETFLAGS
_NO_COPY_ON_WRITE = 0x00800000  # FS_NOCOW_FL
_FILL_NBYTES = 1 << 20
_LONG = 200


@dataclass(frozen=True)
class Opened:
    """A file without a name.

    Attributes:
        fd: Its descriptor.
        direct: Whether O_DIRECT is set.
        reason: Why not, if it is not.
        in_place: Whether it was set never to copy on write. Only file systems that may do so
            (btrfs) have that setting; otherwise a write there would need new space, reserved or
            not.
    """

    fd: int
    direct: bool
    reason: str
    in_place: bool


def check_folder(path: Path) -> Path:
    """Returns the folder's absolute path, after checking that files can be created there.

    Raises:
        ConfigError: If not, naming the path and what to do about it.
    """
    try:
        path = path.absolute()
        mode = os.stat(path).st_mode
        read_only = os.statvfs(path).f_flag & os.ST_RDONLY
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ConfigError(
            f"nvme path {path} does not exist; create the folder or name another"
        ) from error
    except (OSError, ValueError) as error:  # ValueError: a path with a zero byte in it
        raise _unusable(path, error) from error
    if not stat.S_ISDIR(mode):
        raise ConfigError(f"nvme path {path} is not a folder; name the folder, not a file in it")
    if read_only:
        raise ConfigError(f"nvme path {path} is on a read-only file system; name another folder")
    if not os.access(path, os.W_OK | os.X_OK):
        raise ConfigError(
            f"nvme path {path} is not writable for this user; "
            "change its permissions or name another"
        )
    return path


def _unusable(path: Path, error: OSError | ValueError) -> ConfigError:
    """Returns the error of a folder that cannot be accessed."""
    text = str(path)
    if len(text) > _LONG:
        text = f"{text[:40]}...{text[-40:]} ({len(text)} characters)"
    reason = getattr(error, "strerror", None) or str(error)
    remedy = {
        errno.ENAMETOOLONG: "name a shorter path, say through a symbolic link",
        errno.EACCES: "change the permissions of the folders above it, or name another",
        errno.ELOOP: "its symbolic links go in a circle; name another",
    }.get(
        getattr(error, "errno", None) or 0,
        "see what the kernel says of that disk (dmesg), or name a folder on another",
    )
    return ConfigError(f"nvme path {text} cannot be used ({reason}); {remedy}")


def open_nameless(folder: Path) -> Opened:
    """Opens a new file that has no name, bypassing the page cache if the file system can.

    Raises:
        ConfigError: If no file can be created there.
    """
    try:
        fd = _open_file(folder)
    except OSError as error:
        raise ConfigError(
            f"nvme path {folder} takes no file ({error.strerror}); name another folder, on a local "
            "disk that works and that this user may write to"
        ) from error
    try:
        in_place = _write_in_place(fd)
        reason = _make_direct(fd)
    except OSError as error:
        os.close(fd)
        raise _unusable(folder, error) from error
    except BaseException:
        os.close(fd)
        raise
    return Opened(fd, not reason, reason, in_place)


def _open_file(folder: Path) -> int:
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL):
            raise
    fd, name = tempfile.mkstemp(prefix=".tiermem-", dir=folder)
    os.unlink(name)
    return fd


def _write_in_place(fd: int) -> bool:
    """Tells the file system not to copy on write (like ``chattr +C``); returns whether it agreed.

    It has to be told while the file is empty.
    """
    try:
        flags = bytearray(8)
        fcntl.ioctl(fd, _GET_FLAGS, flags)
        (before,) = struct.unpack_from("=I", flags)
        struct.pack_into("=I", flags, 0, before | _NO_COPY_ON_WRITE)
        fcntl.ioctl(fd, _SET_FLAGS, flags)
    except OSError:  # it has no such flag, usually since it never does that
        return False
    return True


def _make_direct(fd: int) -> str:
    """Sets O_DIRECT; returns the reason if that is impossible, otherwise an empty string."""
    unit = dio_alignment(fd)
    if unit == 0:
        return "statx says that this file system has no direct I/O"
    if unit is not None and (unit > ALIGNMENT or ALIGNMENT % unit):
        return f"its direct I/O needs an alignment of {unit} bytes, not {ALIGNMENT}"
    try:
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
    except OSError as error:  # raised with the flag not set
        return f"O_DIRECT is refused ({error.strerror})"
    try:
        _try_write(fd)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return ""  # a full disk does not concern O_DIRECT; reserving will raise
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)
        return f"O_DIRECT is refused ({error.strerror})"
    return ""


def _try_write(fd: int) -> None:
    """Writes one page and removes it: some file systems accept the flag but no such write."""
    with mmap.mmap(-1, ALIGNMENT) as page:
        written = os.pwrite(fd, page, 0)
    os.ftruncate(fd, 0)
    if written != ALIGNMENT:
        raise OSError(errno.EIO, "a page was only written in part")


def dio_alignment(fd: int) -> int | None:
    """Returns the alignment in bytes that direct I/O needs on this file.

    Returns:
        The larger of memory and offset alignment; 0 if there is no direct I/O;
        ``None`` if the kernel does not report it (before 6.1, or another file system).
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "statx"):
        return None
    answer = ctypes.create_string_buffer(_STATX_NBYTES)
    if libc.statx(fd, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, answer) != 0:
        return None
    (mask,) = struct.unpack_from("<I", answer, 0)
    if not mask & _STATX_DIOALIGN:
        return None
    memory, offset = struct.unpack_from("<II", answer, 0x98)
    return 0 if not (memory and offset) else max(memory, offset)


def free_nbytes(facts: os.statvfs_result) -> int | None:
    """Returns the bytes that this user may still take; None if the file system does not report it.

    ramfs, for example, reports that it has no blocks at all.
    """
    return facts.f_bavail * facts.f_frsize if facts.f_blocks else None


def reserve(fd: int, offset: int, nbytes: int) -> None:
    """Allocates disk space for a run of a file.

    Raises:
        OSError: ENOSPC or similar if there is none; the file may have grown in part.
    """
    if nbytes == 0:
        return
    try:
        os.posix_fallocate(fd, offset, nbytes)
    except OSError as error:
        # The C library's fallback writes single bytes, which O_DIRECT does not accept.
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise
        _fill(fd, offset, nbytes)


def _fill(fd: int, offset: int, nbytes: int) -> None:
    """Writes zeros: this allocates space if the file system cannot reserve it."""
    with mmap.mmap(-1, _FILL_NBYTES) as zeros:
        view = memoryview(zeros)
        try:
            end = offset + nbytes
            while offset < end:
                written = os.pwrite(fd, view[: min(_FILL_NBYTES, end - offset)], offset)
                if written == 0:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                offset += written
        finally:
            view.release()
