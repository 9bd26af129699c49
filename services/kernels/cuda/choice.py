"""Choose by timing which products of a traced forward use our CUDA kernel, by rows."""

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import msgspec

from protocol.jobs.kernel_report import KernelProbe
from services.kernels.cuda import product
from services.mlx.fused_linear import FusedSlice
from services.mlx.launching import launch
from services.mlx.loader import compute_unit
from services.mlx.tracing.trace_trial import measure_distance, pays, time_in_turn
from services.runtime.preparation import Steps

_log = logging.getLogger(__name__)

_ROWS = (1, 2, 4, 8, 16, 32, 64)
_LAYERS = 4
"""Layers per shape, whose weights are read in turn when timed."""
_AHEAD = 6
"""Repetitions in a row: the host builds the next ones while the device computes, as in an answer.

If each were awaited, whatever costs the host less would look faster than it is.
"""
_EVEN = 1.03
"""Share of MLX's time that single rows may take, for bits equal to those of several rows."""
_MOST_SLOWER = 2
"""Consecutive numbers of rows without a gain, after which larger ones are not tried."""
_TOLERANCE = 0.01
"""Relative; half precision rounds the result to steps of .001 (float16) or .008 (bfloat16)."""


@dataclass
class _Use:
    """Use of the kernel in this process."""

    least_rows: int = 0
    most_rows: int = 0
    tracing: bool = False


_use = _Use()


@contextmanager
def in_trace() -> Iterator[None]:
    """Allow the kernel for products of few rows inside: the graph will be replayed."""
    before, _use.tracing = _use.tracing, True
    try:
        yield
    finally:
        _use.tracing = before


@contextmanager
def serving(least_rows: int, most_rows: int) -> Iterator[None]:
    """Route up to this many rows of traced code inside through our kernels, blocks too; 0: none."""
    before = _use.least_rows, _use.most_rows
    _use.least_rows, _use.most_rows = least_rows, most_rows
    try:
        yield
    finally:
        _use.least_rows, _use.most_rows = before


def serves(x: mx.array, weight: mx.array) -> bool:
    """Return True if this product currently uses our kernel."""
    rows = x.size // x.shape[-1]
    return _use.tracing and _use.least_rows <= rows <= _use.most_rows and product.takes(x, weight)


class TracedLinear(nn.Linear):
    """A layer whose few rows use our kernel."""

    def serves(self, x: mx.array) -> bool:
        """Return True if these rows use our kernel."""
        return serves(x, self.weight)

    def __call__(self, x: mx.array) -> mx.array:
        """[..., rows, inputs] -> [..., rows, outputs]."""
        if not serves(x, self.weight):
            by_mlx: mx.array = super().__call__(x)
            return by_mlx
        found = product.multiply(x, self.weight)
        return found + self.bias if "bias" in self else found


class TracedEmbedding(nn.Embedding):
    """A tied embedding whose logits of few rows use our kernel."""

    def as_linear(self, x: mx.array) -> mx.array:
        """Logits of [..., rows, inputs]."""
        if not serves(x, self.weight):
            by_mlx: mx.array = super().as_linear(x)
            return by_mlx
        return product.multiply(x, self.weight)


_LAYERS_OF_OURS = {nn.Linear: TracedLinear, nn.Embedding: TracedEmbedding}


def use_products(model: nn.Module) -> Steps[KernelProbe | None]:
    """Use the kernel for a model on CUDA where it is correct and faster; return the measurements.

    Replaces the choice of an earlier call. Returns None on other devices, and for models whose
    weights the kernel does not support.
    """
    _use.least_rows = _use.most_rows = 0
    layers = list(_find_layers(model)) if compute_unit() == "cuda" else []
    if not layers:
        return None
    by_shape = defaultdict[Any, list[Any]](list)
    for layer in layers:
        layer.__class__ = _LAYERS_OF_OURS.get(type(layer), type(layer))
        by_shape[layer.weight.shape].append(layer)
    found = yield from _try_rows([layer for own in by_shape.values() for layer in own[:_LAYERS]])
    _use.least_rows, _use.most_rows = found.least_rows, found.most_rows
    name = str(layers[0].weight.dtype).rpartition(".")[2]
    _log.info(
        "products of %d to %d rows go through our kernel in traces",
        found.least_rows,
        found.most_rows,
    )
    return msgspec.structs.replace(
        found, shape=f"products of {len(by_shape)} shapes, {name}", layers=len(layers)
    )


def _find_layers(model: nn.Module) -> Iterator[Any]:
    """Return the layers that the kernel supports, joint ones in place of their parts."""
    modules = [module for _, module in model.named_modules()]
    parts = [module for module in modules if type(module) is FusedSlice]
    alone = {id(part.own) for part in parts}
    kinds = {nn.Linear, TracedLinear}
    if not any(name.endswith("lm_head") for name, _ in model.named_modules()):
        kinds |= {nn.Embedding, TracedEmbedding}  # tied
    joints = [part.joint for part in parts]
    joints += [one for one in modules if type(one) in kinds and id(one) not in alone]
    different = {id(layer): layer for layer in joints}
    yield from (layer for layer in different.values() if product.takes(layer.weight, layer.weight))


def _try_rows(layers: list[Any]) -> Steps[KernelProbe]:
    """Find the numbers of rows for which the kernel is correct, and faster in total."""
    furthest, reason, slower = 0.0, "", 0
    own_ms, mlx_ms = dict[int, float](), dict[int, float]()
    for rows in _ROWS:
        inputs = [_normal((1, rows, layer.weight.shape[1]), layer.weight.dtype) for layer in layers]
        try:
            by_mlx, ours = (_trace(layers, most_rows) for most_rows in (0, rows))
            distance = max(map(measure_distance, by_mlx(inputs), ours(inputs)))
        except (RuntimeError, ValueError, TypeError, OSError) as error:
            reason = f"of {rows} rows it does not run here: {error}"
            break
        furthest = max(furthest, distance)
        if not distance < _TOLERANCE:
            reason = f"of {rows} rows its result is {distance:.2g} from MLX's"
            break
        yield
        ways = [partial(_repeat, way, inputs) for way in (ours, by_mlx)]
        own_s, mlx_s = yield from time_in_turn(ways)
        own_ms[rows], mlx_ms[rows] = 1e3 * own_s / _AHEAD, 1e3 * mlx_s / _AHEAD
        slower = 0 if rows == 1 or pays(own_ms[rows], mlx_ms[rows]) else slower + 1
        if slower == _MOST_SLOWER:
            break
    if reason:
        _log.warning("our kernel for products: %s", reason)
    least, most = _choose_range(own_ms, mlx_ms)
    if not reason and most < _ROWS[-1]:
        reason = "more are faster by MLX" if most else "it is not faster than MLX's"
    return KernelProbe(
        kernel="product", shape="", least_rows=least, most_rows=most, reason=reason,
        distance=furthest, own_ms=own_ms, mlx_ms=mlx_ms,
    )  # fmt: skip


def _choose_range(own_ms: dict[int, float], mlx_ms: dict[int, float]) -> tuple[int, int]:
    """Return the fewest and the most rows for which the kernel is used, among those timed.

    The range with the largest total gain is chosen: one bad timing, or a small loss, does not
    exclude the others. 0, 0 if nothing is gained.
    """
    least, most, gained, best = 0, 0, 0.0, 0.0
    for rows, ours in own_ms.items():
        is_even = rows == 1 and ours <= _EVEN * mlx_ms[rows]
        if not (least or is_even or pays(ours, mlx_ms[rows])):
            continue
        least = least or rows
        gained += 1.0 - ours / mlx_ms[rows]
        if gained > best:
            most, best = rows, gained
    # A single row alone needs no bits equal to those of several rows.
    paying = [rows for rows, ours in own_ms.items() if pays(ours, mlx_ms[rows])]
    return (least, most) if paying and (most > 1 or most in paying) else (0, 0)


Products = Callable[[list[mx.array]], list[mx.array]]


def _repeat(products: Products, inputs: list[mx.array]) -> list[mx.array]:
    """Queue the products several times; return the last ones."""
    outputs = inputs
    for _ in range(_AHEAD):
        outputs = products(inputs)
        launch(outputs)
    return outputs


def _trace(layers: list[Any], most_rows: int) -> Products:
    """Trace the products of all these layers, by the kernel up to `most_rows` rows."""

    def multiply(inputs: list[mx.array]) -> list[mx.array]:
        with serving(1, most_rows), in_trace():
            return [_call(layer, x) for layer, x in zip(layers, inputs, strict=True)]

    compiled: Products = mx.compile(multiply)
    return compiled


def _call(layer: Any, x: mx.array) -> mx.array:
    product_of = layer.as_linear if isinstance(layer, nn.Embedding) else layer
    found: mx.array = product_of(x)
    return found


def _normal(shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    return mx.random.normal(shape, dtype, key=mx.random.key(0))
