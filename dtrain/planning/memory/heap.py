"""Memory that malloc takes from the system for tensors on a CPU: the tensors, and the holes between them.

torch asks glibc for blocks aligned to 64 bytes. ``posix_memalign`` takes 96 bytes more than it was asked for, and frees
the remainders before and behind the aligned block (glibc 2.36, malloc/malloc.c, ``_int_memalign``). Small objects, such
as those of tensors and of autograd, are put into these remainders. While one is there, the holes on both sides of it
stay apart, and a hole that one block has left is 96 bytes too small for the next block of the same size.
"""

from __future__ import annotations

from bisect import bisect_left, insort

LIMIT = 31 * 2**20
"""Bytes from which glibc's malloc maps a block instead of taking it from its heap (``engine.initialize`` sets it)."""

_SMALL = 2048  # bytes; smaller blocks are too few bytes to count
_ALIGNMENT = 64
_REMAINDERS = _ALIGNMENT + 32  # MINSIZE: bytes of both remainders of a block
_GRANULE = 16
_CACHED = 2 * 7  # remainders that malloc's cache of a thread keeps: about seven of each of two sizes


class Heap:
    """Simulates glibc's heap: best fit, neighboring holes merge, blocks from ``LIMIT`` on are mapped.

    ``peak`` are the bytes that malloc has taken from the system at most, mapped blocks included.
    """

    def __init__(self, num_objects: int) -> None:
        """Takes the number of small objects of a tensor that are put into remainders."""
        self._num_objects = num_objects
        self.peak = self._count = 0
        self._end = self._extent = self._mapped = 0  # of the used part; the most so far; bytes
        self._blocks: dict[int, tuple[int, int]] = {}  # start and bytes, by key
        self._objects: dict[int, list[tuple[int, int]]] = {}  # remainders that the objects of a block occupy
        self._remainders: list[tuple[int, int]] = []  # start and bytes of those that are free, the newest last
        self._holes: list[tuple[int, int]] = []  # bytes and start, ascending
        self._starting: dict[int, int] = {}  # bytes of a hole by its start
        self._ending: dict[int, int] = {}  # start of a hole by its end

    def trim(self) -> None:
        """Gives back what is free at the end of the heap; the peak starts again."""
        self._extent = self._end
        self.peak = self._mapped + self._extent

    def allocate(self, key: int, nbytes: int) -> None:
        """Takes a block; ``key`` names it until it is released."""
        if nbytes >= LIMIT:
            self._mapped += nbytes
            self._blocks[key] = -1, nbytes
        elif nbytes >= _SMALL:
            self._place(key, nbytes)
        self.peak = max(self.peak, self._mapped + self._extent)

    def release(self, key: int) -> None:
        """Frees a block; one that is not known is too small to count."""
        start, nbytes = self._blocks.pop(key, (0, 0))
        if start < 0:
            self._mapped -= nbytes
        elif nbytes:
            self._free(start, nbytes)
            for remainder in self._objects.pop(key):
                self._keep(*remainder)

    def _place(self, key: int, nbytes: int) -> None:
        needed = nbytes + _REMAINDERS
        index = bisect_left(self._holes, (needed, -1))
        if index < len(self._holes):
            room, start = self._holes[index]
            self._take(start)
        else:
            room, start = needed, self._end
            self._end += needed
            self._extent = max(self._extent, self._end)
        self._count += 1
        before = self._count * _GRANULE % _ALIGNMENT  # addresses are not known: offsets are spread evenly
        behind = _REMAINDERS - before
        end = start + before + nbytes
        self._blocks[key] = start + before, nbytes
        self._free(end + behind, room - needed)
        if before:
            self._keep(start, before)
        self._keep(end, behind)
        self._objects[key] = [self._remainders.pop() for _ in range(min(self._num_objects, len(self._remainders)))]

    def _keep(self, start: int, nbytes: int) -> None:
        """Puts a remainder into malloc's cache; what the cache cannot keep becomes a hole."""
        if len(self._remainders) < _CACHED:
            self._remainders.append((start, nbytes))
        else:
            self._free(start, nbytes)

    def _free(self, start: int, nbytes: int) -> None:
        """Makes a hole, merged with its neighbors."""
        if not nbytes:
            return
        if start in self._ending:
            before = self._ending[start]
            nbytes += self._take(before)
            start = before
        if start + nbytes in self._starting:
            nbytes += self._take(start + nbytes)
        if start + nbytes == self._end:
            self._end = start
            return
        self._starting[start] = nbytes
        self._ending[start + nbytes] = start
        insort(self._holes, (nbytes, start))

    def _take(self, start: int) -> int:
        """Removes a hole and returns its bytes."""
        nbytes = self._starting.pop(start)
        del self._ending[start + nbytes]
        del self._holes[bisect_left(self._holes, (nbytes, start))]
        return nbytes
