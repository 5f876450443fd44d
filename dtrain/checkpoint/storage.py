"""Every change that a checkpoint makes to the file system, one system call each.

The rest of the package changes nothing on disk but through these functions, called as ``storage.NAME``: a test can
record them, make one fail or die at one of them, and so replay every state that a crash may leave behind.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path


def make_directory(path: Path) -> None:
    """Makes one directory; its parent exists and it does not.

    Raises:
        OSError: what the file system says.
    """
    os.mkdir(path)


def create(path: Path) -> int:
    """Opens a new file for writing and returns its descriptor; a file that exists, or a link, is refused.

    Raises:
        OSError: what the file system says.
    """
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)


def write(descriptor: int, data: bytes | memoryview) -> None:
    """Appends all of ``data``, however little each system call takes; the disk begins on it at once.

    Raises:
        OSError: what the file system says.
    """
    view = memoryview(data)
    while view:
        written = os.write(descriptor, view)
        view = view[written:]
        # a kernel left alone starts when it is told to sync, and the disk idles while the rest is copied to its cache
        end = os.lseek(descriptor, 0, os.SEEK_CUR)
        if hasattr(os, "posix_fadvise"):  # not on macOS
            os.posix_fadvise(descriptor, end - written, written, os.POSIX_FADV_DONTNEED)


def overwrite(descriptor: int, data: bytes) -> None:
    """Replaces the file's first bytes by ``data``, however little each system call takes.

    Raises:
        OSError: what the file system says.
    """
    offset = 0
    while offset < len(data):
        offset += os.pwrite(descriptor, data[offset:], offset)


def sync(descriptor: int) -> None:
    """Returns when the file's bytes are on the disk. Never tried again after a failure: the kernel forgets the pages.

    Raises:
        OSError: what the file system says.
    """
    os.fsync(descriptor)


def close(descriptor: int) -> None:
    """Closes a descriptor of :func:`create`."""
    os.close(descriptor)


def sync_directory(path: Path) -> None:
    """Returns when the names in the directory are on the disk.

    Raises:
        OSError: what the file system says.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename(source: Path, target: Path) -> None:
    """Gives ``source`` its new name, which nothing has yet: rename(2) alone would replace an empty directory.

    Raises:
        OSError: what the file system says; FileExistsError where ``target`` exists.
    """
    if os.path.lexists(target):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
    os.rename(source, target)


def link(source: Path, target: Path) -> None:
    """Gives the file ``source`` a second name, which nothing has yet: of several that try, one succeeds.

    Raises:
        OSError: what the file system says; FileExistsError where ``target`` exists.
    """
    os.link(source, target)


def remove_file(path: Path) -> None:
    """Removes one file or link.

    Raises:
        OSError: what the file system says.
    """
    os.unlink(path)


def remove_directory(path: Path) -> None:
    """Removes one empty directory.

    Raises:
        OSError: what the file system says.
    """
    os.rmdir(path)
