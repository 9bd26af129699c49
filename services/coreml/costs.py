"""Time of a call of each function, and the device that runs it."""

import statistics
import time

import numpy as np

from protocol.jobs.convert import FunctionCost
from services.coreml.functions import PackageFunction
from services.coreml.model import ConvertedModel, chain_feed
from services.coreml.runtime.blob import Array
from services.coreml.runtime.executor import State


def measure(model: ConvertedModel, calls: int) -> list[FunctionCost]:
    """Return the median of `calls` calls of every function, the first left out."""
    state = model.new_state()
    executor = model.executor
    costs = []
    for function in model.manifest.functions:
        times = [_time_call(model, function, state) for _ in range(calls + 1)][1:]
        placement = getattr(executor, "placements", {}).get(function.name)
        costs.append(
            FunctionCost(
                name=function.name,
                call_ms=statistics.median(times),
                tokens=function.tokens,
                load_ms=getattr(executor, "load_ms", {}).get(function.name, 0.0),
                unit=unit_of(model, function.name),
                devices=placement.devices if placement else {},
                off_ane=placement.off_ane if placement else {},
            )
        )
    return costs


def warm(model: ConvertedModel) -> None:
    """Call every function with a state once: CoreML's first calls take many times as long."""
    state = model.new_state()
    for function in model.manifest.functions:
        if function.stateful:
            _time_call(model, function, state)


def unit_of(model: ConvertedModel, function: str) -> str:
    """Return the device that runs a function, if known, rather than the requested one."""
    placement = getattr(model.executor, "placements", {}).get(function)
    return placement.unit if placement else model.executor.compute_unit


def _time_call(model: ConvertedModel, function: PackageFunction, state: list[State]) -> float:
    feed = chain_feed([1] * function.tokens, 0, model.slots)
    past = [] if function.stateful else empty_past(model)
    started = time.perf_counter()
    if function.stateful:
        model.run(function.name, feed, state)
    else:
        model.keys_values(function.name, feed, past)
    return 1e3 * (time.perf_counter() - started)


def empty_past(model: ConvertedModel) -> list[tuple[Array, Array]]:
    """Return empty keys and values per part."""
    shape = model.manifest.architecture
    return [
        (
            np.zeros((part.layers, shape.kv_heads, model.slots, shape.head_dim), np.float32),
            np.zeros((part.layers, shape.kv_heads, model.slots, shape.head_dim), np.float32),
        )
        for part in model.manifest.parts
    ]
