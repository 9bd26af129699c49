"""What is there when the work begins is collected once, and then left alone."""

import gc
import weakref

from protocol.process.heap import freeze_heap


class Node:
    """Part of a cycle that only a collection can end."""

    def __init__(self) -> None:
        self.itself = self


def test_what_is_garbage_goes_and_what_is_kept_is_not_searched_again() -> None:
    """Whatever a process loads; what comes later is collected as ever."""
    kept, lost = Node(), weakref.ref(Node())
    try:
        freeze_heap()
        assert lost() is None
        assert not any(tracked is kept for tracked in gc.get_objects())
        later = weakref.ref(Node())
        gc.collect()
        assert later() is None
    finally:
        gc.unfreeze()
