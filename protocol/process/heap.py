"""Freezes long-lived objects, so that the garbage collector does not scan them repeatedly."""

import gc

_YOUNG_COLLECTIONS = 100
"""Between two full ones; ten is Python's own number."""


def freeze_heap() -> None:
    """Freeze the heap once everything is loaded: a full collection takes 10 to 50 ms of a round."""
    gc.collect()
    gc.freeze()


def collect_rarely() -> None:
    """Collect everything less often: with thousands of connections it takes 0.1 s each time."""
    gc.set_threshold(*gc.get_threshold()[:2], _YOUNG_COLLECTIONS)
