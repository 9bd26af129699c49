"""A limit on calls that may never return: drivers are known to hang, with Python's GIL held."""

import contextlib
import signal
from collections.abc import Iterator


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """End this process if the block takes longer.

    The kernel's timer and the default action of SIGALRM need no thread to run. The supervisor
    restarts the drafter; the request continues meanwhile.
    """
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
