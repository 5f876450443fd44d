"""One file of results, and the compilers' caches, which go out of one machine and into the next. No torch."""

from __future__ import annotations

import gzip
import io
import os
import tarfile
import tempfile
import time
import zlib
from collections.abc import Collection
from pathlib import Path

from dtrain.distributed.logging import logger
from dtrain.errors import ConfigError

_CACHES = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
_CACHE_MIB = 15.0  # of a file of caches: small ones go first, and what exceeds it is left out
_GUESSED_RATIO = 0.5  # of compressed to plain size


def write_archive(path: Path, folder: Path, *, leave_out: Collection[str]) -> None:
    """Replaces ``path`` by a compressed archive of ``folder``.

    Args:
        path: the archive.
        folder: what it has.
        leave_out: files and folders in ``folder``, by their relative paths, that it has not.
    """
    temporary = _beside(path)
    with tarfile.open(temporary, "w:gz", compresslevel=3) as tar:
        for root, folders, names in os.walk(folder):
            inside = Path(root).relative_to(folder)
            folders[:] = sorted(name for name in folders if str(inside / name) not in leave_out)
            for name in sorted(names):
                if not name.endswith(".tmp") and str(inside / name) not in leave_out:
                    _add_if_there(tar, Path(root, name), str(folder.name / inside / name))
    temporary.replace(path)


def _add_if_there(tar: tarfile.TarFile, file: Path, name: str) -> None:
    """Adds what the file has now. ``tar.add`` raises if a job replaces or removes it meanwhile."""
    try:
        content = file.read_bytes() if file.is_file() else None
    except OSError:
        return
    if content is not None:
        entry = tarfile.TarInfo(name)
        entry.size, entry.mtime = len(content), int(time.time())
        tar.addfile(entry, io.BytesIO(content))


def use_caches(folder: Path, archive: Path | None) -> None:
    """Sets the folders of compilers' caches for the jobs, unless the environment names others, and fills them.

    Raises:
        ConfigError: ``archive`` is no archive of caches.
    """
    for variable, name in _CACHES.items():
        os.environ.setdefault(variable, str((folder / name).absolute()))
    by_name = {name: os.environ[variable] for variable, name in _CACHES.items()}
    if not os.access(Path.home(), os.W_OK):
        for variable in ("TRITON_HOME", "TORCH_EXTENSIONS_DIR"):
            os.environ.setdefault(
                variable, str(Path(tempfile.gettempdir(), f"dtrain-{os.getuid()}-{variable.lower()}"))
            )
    if archive is None or not archive.exists():
        return
    try:
        with tarfile.open(archive, "r:gz") as tar:
            for entry in tar:
                kind, _, rest = entry.name.partition("/")
                if kind in by_name and rest and entry.isfile():
                    entry.name = rest
                    tar.extract(entry, by_name[kind], filter="data")
    except (tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise ConfigError(f"caches={archive} is not an archive of caches: {error}; remove it") from error


def write_caches(path: Path) -> None:
    """Replaces ``path`` by an archive of the caches, folder by folder from the smallest, within a limit.

    A folder is kept or left out as a whole, because an entry of Triton's cache that lacks a file is an error, no miss.
    """
    sizes: dict[tuple[Path, str], int] = {}
    for variable, name in _CACHES.items():
        root = Path(os.environ[variable])
        for file in root.rglob("*") if root.is_dir() else ():
            if file.is_file() and not file.is_symlink():
                inside = str(Path(name, file.parent.relative_to(root)))
                sizes[file.parent, inside] = sizes.get((file.parent, inside), 0) + file.stat().st_size
    temporary = _beside(path)
    num_left_out = 0
    with tarfile.open(temporary, "w:gz", compresslevel=3) as tar:
        for folder, inside in sorted(sizes, key=lambda key: sizes[key]):
            if temporary.stat().st_size + _GUESSED_RATIO * sizes[folder, inside] > _CACHE_MIB * 2**20:
                num_left_out += 1
                continue
            for file in folder.iterdir():
                if file.is_file() and not file.is_symlink():
                    tar.add(file, f"{inside}/{file.name}")
    temporary.replace(path)
    if num_left_out:
        logger.info("%s: %d large folders of the caches are left out", path, num_left_out)


def _beside(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.with_name(f".{path.name}.tmp")
