"""Memory of a loaded model: estimated before loading, measured afterwards."""

from collections.abc import Iterable
from pathlib import Path

import psutil

from launch.models.pair import Pair
from launch.models.weights import weights_of
from launch.settings.machine import computes_on_cpu
from launch.settings.settings import StackSettings
from protocol.errors import ModelError

_PROCESSES_BYTES = 300_000_000
"""Interpreters and libraries of a stack's processes together."""
_CONTEXT_TOKENS = 4096
"""Tokens whose KV is included; more are allocated by requests."""


def estimate_memory(settings: StackSettings, pair: Pair) -> int:
    """Estimate the bytes that a stack of this pair will take; 0 if its files do not tell.

    Args:
        settings: settings of the stack.
        pair: its models.
    """
    models = [(pair.model, settings.target_device)]
    if pair.backend == "mlx":
        models.append((pair.draft_model, settings.draft_device))
    total = _PROCESSES_BYTES
    for folder, device in models:
        try:
            size = weights_of(Path(folder))
        except ModelError:
            return 0
        kind = "cpu" if computes_on_cpu(device) else "gpu"
        tokens = min(_CONTEXT_TOKENS, size.context_length or _CONTEXT_TOKENS)
        total += size.bytes_on(kind) + size.kv_bytes_on(kind) * tokens
    return total


def measure_memory(pids: Iterable[int]) -> int:
    """Return the resident bytes of these processes; those that have ended count as zero."""
    total = 0
    for pid in pids:
        try:
            total += psutil.Process(pid).memory_info().rss
        except psutil.Error:
            continue
    return total
