"""How many threads numpy's matrix products may use in this process."""

from threadpoolctl import threadpool_limits


def limit(threads: int) -> None:
    """Hold the BLAS of numpy to so many threads.

    It counts the machine's cores when it is loaded, before this process is pinned to its own,
    and threads that share a core wait for each other.
    """
    threadpool_limits(limits=threads, user_api="blas")
