"""Processes that decode images."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from subprocess import PIPE, Popen
from typing import IO

import numpy as np
from numpy.typing import NDArray

from dtrain.data.images.decode import HEADER, ImageError, View, decode_all
from dtrain.errors import DataError, one_line

_MODULE = "dtrain.data.images.decode"


class Decoder:
    """Decodes files to pixels, in processes of its own or, without any, in the calling thread; the bits are the same.

    The processes start with the first request, and end with this object, after an error, or with this process.

    Args:
        num_workers: processes.
    """

    def __init__(self, num_workers: int, size: int, channels: str) -> None:
        self._num_workers = num_workers
        self._size = size
        self._channels = channels
        self._workers: list[Popen[bytes]] = []
        self._logs: list[IO[bytes]] = []  # one, while there are processes
        self._lock = threading.Lock()  # training and validation may ask at the same time
        self._finalizer = weakref.finalize(self, _end, self._workers, self._logs)

    def decode(self, files: Sequence[str], views: Sequence[View]) -> NDArray[np.uint8]:
        """Returns the pixels of ``views`` of ``files``, [files, S, S, C].

        Raises:
            DataError: a file is no image that can be decoded, or a process was ended from outside.
        """
        if self._num_workers == 0:
            try:
                answers = [decode_all(files, views, self._size, self._channels)]
            except ImageError as error:
                raise DataError(undecodable(str(error))) from None
        else:
            with self._lock:
                try:
                    answers = self._ask(files, views)
                except BaseException:
                    _end(self._workers, self._logs)  # an answer may be left in a pipe
                    raise
        pixels = np.frombuffer(b"".join(answers), np.uint8)
        return pixels.reshape(len(files), self._size, self._size, -1)

    def _ask(self, files: Sequence[str], views: Sequence[View]) -> list[bytes]:
        if not self._workers:
            self._start()
        bounds = np.linspace(0, len(files), min(len(files), self._num_workers) + 1).astype(int)
        # a process reads the whole request before it answers, so neither pipe can block the other
        asked = list(zip(self._workers, bounds[:-1], bounds[1:], strict=False))
        for worker, start, stop in asked:
            request = {
                "files": list(files[start:stop]),
                "views": list(views[start:stop]),
                "size": self._size,
                "channels": self._channels,
            }
            assert worker.stdin is not None
            with suppress(BrokenPipeError):  # the missing answer tells
                worker.stdin.write(json.dumps(request).encode() + b"\n")
                worker.stdin.flush()
        return [self._answer(worker) for worker, _, _ in asked]

    def _answer(self, worker: Popen[bytes]) -> bytes:
        assert worker.stdout is not None
        header = worker.stdout.read(HEADER.size)
        is_pixels, length = HEADER.unpack(header) if len(header) == HEADER.size else (False, 0)
        answer = worker.stdout.read(length)
        if not length or len(answer) < length:
            raise DataError(self._reason_of_end(worker))
        if not is_pixels:
            raise DataError(undecodable(answer.decode(errors="replace")))
        return answer

    def _start(self) -> None:
        package_parent = str(Path(__file__).resolve().parents[3])
        path = os.pathsep.join(filter(None, (package_parent, os.environ.get("PYTHONPATH"))))
        self._logs.append(tempfile.TemporaryFile())  # noqa: SIM115
        for _ in range(self._num_workers):
            self._workers.append(
                Popen(
                    [sys.executable, "-P", "-m", _MODULE],  # no code of the working directory
                    stdin=PIPE,
                    stdout=PIPE,
                    stderr=self._logs[0],
                    env={**os.environ, "PYTHONPATH": path},
                )
            )

    def _reason_of_end(self, worker: Popen[bytes]) -> str:
        worker.kill()
        code = worker.wait()
        self._logs[0].seek(0)
        lines = self._logs[0].read().decode(errors="replace").strip().splitlines()
        reason = lines[-1] if lines else "memory may be short: lower data.workers"
        return f"a process that decodes images ended with code {code}: {reason}"


def undecodable(reason: str) -> str:
    """Returns the message for an image that cannot be decoded."""
    return f"{one_line(reason)}; replace the file or take it out of its folder"


def _end(workers: list[Popen[bytes]], logs: list[IO[bytes]]) -> None:
    for worker in workers:
        worker.kill()  # it holds nothing that is to be kept
    for worker in workers:
        worker.wait()
        for stream in (worker.stdin, worker.stdout):
            with suppress(BrokenPipeError):
                if stream is not None:
                    stream.close()
    for log in logs:
        log.close()
    workers.clear()
    logs.clear()
