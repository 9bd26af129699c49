"""Measure the speed of the link from each rank to the next."""

import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from services.kernels.register import kernels

_SMALL_ROUNDS, _LARGE_ROUNDS = 25, 4
_LARGE_BYTES = 1 << 21


def measure_link(group: mx.distributed.Group) -> tuple[float, float]:
    """Return latency in ms (half a round trip) and MB/s to the next rank; all ranks take part.

    Pairs are measured one after the other: a rank and its neighbour exchange arrays while the rest
    wait. On CUDA, MLX can compute only with all ranks at once; there a sum over all is timed.
    """
    if kernels().device == "cuda":
        return _measure(lambda array: mx.eval(mx.distributed.all_sum(array, group=group)))
    measured = (0.0, 0.0)
    for first in range(group.size()):
        second = (first + 1) % group.size()
        if group.rank() == first:
            measured = _ask(group, second)
        elif group.rank() == second:
            _answer(group, first)
        mx.eval(mx.distributed.all_sum(mx.array(1.0), group=group))
    return measured


def _ask(group: mx.distributed.Group, peer: int) -> tuple[float, float]:
    def exchange(array: mx.array) -> None:
        _send(group, array, peer)
        _receive(group, array, peer)

    latency_ms, mbytes_per_s = _measure(exchange)
    return latency_ms / 2, 2 * mbytes_per_s


def _measure(exchange: Callable[[mx.array], None]) -> tuple[float, float]:
    """Return the milliseconds of a small exchange, and the MB/s of a large one on top of that."""
    small, large = mx.zeros(1), mx.zeros(_LARGE_BYTES // 4)

    def once(array: mx.array) -> float:
        started = time.perf_counter()
        exchange(array)
        return time.perf_counter() - started

    # Take the best of several: other load on the machines is not a property of the link.
    mx.eval(small, large)
    small_s = min(once(small) for _ in range(_SMALL_ROUNDS))
    large_s = min(once(large) for _ in range(_LARGE_ROUNDS))
    transfer_s = max(large_s - small_s, large_s / 2)
    return 1e3 * small_s, _LARGE_BYTES / transfer_s / 1e6


def _answer(group: mx.distributed.Group, peer: int) -> None:
    for array, rounds in (
        (mx.zeros(1), _SMALL_ROUNDS),
        (mx.zeros(_LARGE_BYTES // 4), _LARGE_ROUNDS),
    ):
        for _ in range(rounds):
            _receive(group, array, peer)
            _send(group, array, peer)


def _send(group: mx.distributed.Group, array: mx.array, peer: int) -> None:
    mx.eval(mx.distributed.send(array, peer, group=group))


def _receive(group: mx.distributed.Group, array: mx.array, peer: int) -> None:
    received: Any = mx.distributed.recv_like(array, peer, group=group)
    mx.eval(received)
