"""A limit on calls that may never return: drivers are known to hang, with Python's lock held."""

import contextlib
import signal
from collections.abc import Iterator


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """End this process if the block takes longer.

    The kernel's timer and the default action of SIGALRM need no thread of ours to run. The
    supervisor sees the death and starts another drafter; the request goes on meanwhile.
    """
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
