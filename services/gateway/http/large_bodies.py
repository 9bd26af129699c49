"""Large bodies are read in a thread, one after the other, so that the loop goes on meanwhile."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

from protocol.process.closeable import Closeable

LARGE_BYTES = 64 * 1024
"""From here on a body is large: a smaller one is read within a few milliseconds."""

P = ParamSpec("P")
T = TypeVar("T")


class LargeBodies(Closeable):
    """The thread and its line, which small bodies pass by."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "large bodies")

    async def read(self, size: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `work` on a body of `size` bytes, in a thread if large; its errors propagate."""
        if size < LARGE_BYTES:
            return work(*args, **kwargs)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, partial(work, *args, **kwargs))

    def close(self) -> None:
        """End the thread; safe to call twice."""
        self._thread.shutdown(wait=False, cancel_futures=True)
