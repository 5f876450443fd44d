"""Contains every file system change of the package, one system call each.

The rest of the package changes the disk only through these functions, called as ``storage.NAME``. A test can therefore
record them, make one fail, or kill the process at one of them, and so replay every state that a crash may leave. All of
them raise ``OSError`` if the system call fails.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path


def make_directory(path: Path) -> None:
    """Creates one directory; its parent exists and it does not."""
    os.mkdir(path)


def create(path: Path) -> int:
    """Creates a file for writing and returns its descriptor; fails if a file or link of that name exists."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)


def write(descriptor: int, data: bytes | memoryview) -> None:
    """Appends all of ``data``, completing short writes, and starts its writeback at once."""
    view = memoryview(data)
    while view:
        written = os.write(descriptor, view)
        view = view[written:]
        # left alone, the kernel starts writeback at fsync, and the disk idles while we fill the page cache
        end = os.lseek(descriptor, 0, os.SEEK_CUR)
        if hasattr(os, "posix_fadvise"):  # not on macOS
            os.posix_fadvise(descriptor, end - written, written, os.POSIX_FADV_DONTNEED)


def overwrite(descriptor: int, data: bytes) -> None:
    offset = 0
    while offset < len(data):
        offset += os.pwrite(descriptor, data[offset:], offset)


def sync(descriptor: int) -> None:
    """Syncs the file's bytes to disk. Never retry after a failure: the kernel drops the dirty pages."""
    os.fsync(descriptor)


def close(descriptor: int) -> None:
    os.close(descriptor)


def sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename(source: Path, target: Path) -> None:
    """Renames ``source``; refuses an existing ``target``, because rename(2) would replace an empty directory."""
    if os.path.lexists(target):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
    os.rename(source, target)


def link(source: Path, target: Path) -> None:
    """Adds the name ``target`` to the file ``source``; of several processes that try, exactly one succeeds."""
    os.link(source, target)


def remove_file(path: Path) -> None:
    os.unlink(path)


def remove_directory(path: Path) -> None:
    os.rmdir(path)
