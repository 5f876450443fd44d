"""When Python's garbage is collected."""

from __future__ import annotations

import gc

_STEPS_OF_START = 2  # they make what stays: buffers, caches, compiled code


class GarbageCollection:
    """Inside, Python's garbage is collected after the same steps on all ranks, and at no other time.

    Python's own collector stops a rank whenever that has made enough objects. Each rank reaches that point at another
    time, and all others then wait for it. The first two steps run with that collector. After them all objects of the
    process leave its view, so that a later collection only visits what was made since. At the end of the context the
    collector works as before it.

    If somebody else has called ``gc.freeze``, nothing more is frozen: ``gc.unfreeze`` at the end would undo theirs too.

    Args:
        every: attempted steps from one collection to the next; 0: Python's own collector decides.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self._steps = 0
        self._was_enabled = self._has_frozen = False

    def __enter__(self) -> GarbageCollection:
        self._was_enabled = gc.isenabled()
        return self

    def __exit__(self, *_: object) -> None:
        if self._has_frozen:
            gc.unfreeze()
        if self._was_enabled:
            gc.enable()

    def after_step(self, step: int, *, at_pause: bool = False) -> None:
        """Collects if it is time; all ranks call it with the same arguments.

        Args:
            step: number of attempted steps.
            at_pause: collects now, because the ranks have not trained since ``step``.
        """
        self._steps += 1
        if not self._every or self._steps < _STEPS_OF_START:
            return
        if self._steps == _STEPS_OF_START:
            gc.disable()
            gc.collect()
            self._has_frozen = not gc.get_freeze_count()
            if self._has_frozen:
                gc.freeze()
        elif at_pause or step % self._every == 0:
            gc.collect()
