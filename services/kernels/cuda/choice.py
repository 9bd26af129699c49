"""Choose by timing which products of a traced forward use our CUDA kernel, by rows."""

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
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
from services.mlx.patches import Patch, install, patches_of, remove
from services.mlx.selftest import check, pays
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
"""Share of MLX's time that single rows may take, so that they get the bits of several rows."""
_MOST_SLOWER = 2
"""Consecutive numbers of rows without a gain, after which larger ones are not tried."""


_tracing = ContextVar("tracing", default=False)


@contextmanager
def in_trace() -> Iterator[None]:
    """Allow the kernel for products of few rows inside: the graph will be replayed."""
    before = _tracing.set(True)
    try:
        yield
    finally:
        _tracing.reset(before)


@dataclass
class FewRows:
    """The numbers of rows for which a model's traces use our kernels, those of blocks included."""

    least: int = 0
    most: int = 0

    def serve(self, x: mx.array, weight: mx.array) -> bool:
        """Return True if this product currently uses our kernel."""
        is_within = _tracing.get() and self.least <= x.size // x.shape[-1] <= self.most
        return is_within and product.takes(x, weight)


class TracedLinear(nn.Linear):
    """A linear layer that uses our kernel for few rows."""

    few_rows: FewRows

    def serves(self, x: mx.array) -> bool:
        """Return True if these rows use our kernel."""
        return self.few_rows.serve(x, self.weight)

    def __call__(self, x: mx.array) -> mx.array:
        """[..., rows, inputs] -> [..., rows, outputs]."""
        if not self.serves(x):
            by_mlx: mx.array = super().__call__(x)
            return by_mlx
        return self.multiply(x)

    def multiply(self, x: mx.array, norm: product.Norm | None = None) -> mx.array:
        """Return the layer's outputs by our kernel, of rows that are normed first if asked."""
        return product.multiply(x, self.weight, norm=norm, more=self.get("bias"))


class TracedEmbedding(nn.Embedding):
    """A tied embedding that uses our kernel for the logits of few rows."""

    few_rows: FewRows

    def as_linear(self, x: mx.array) -> mx.array:
        """Return the logits of [..., rows, inputs]."""
        if not self.few_rows.serve(x, self.weight):
            by_mlx: mx.array = super().as_linear(x)
            return by_mlx
        return product.multiply(x, self.weight)


_LAYERS_OF_OURS = {nn.Linear: TracedLinear, nn.Embedding: TracedEmbedding}


def use_products(model: nn.Module) -> Steps[KernelProbe | None]:
    """Use the kernel for a model on CUDA where it is correct and faster; return the measurements.

    Replaces the choice of an earlier call. Returns None on other devices, and for models whose
    weights the kernel does not support.
    """
    layers = list(_find_layers(model)) if compute_unit() == "cuda" else []
    if not layers:
        return None
    by_shape, few = defaultdict[Any, list[Any]](list), FewRows()
    for layer in layers:
        remove(patches_of(layer))
        install([Patch(layer, _LAYERS_OF_OURS.__getitem__, {"few_rows": few})])
        by_shape[layer.weight.shape].append(layer)
    some = [layer for own in by_shape.values() for layer in own[:_LAYERS]]
    found = yield from _try_rows(some, few)
    few.least, few.most = found.least_rows, found.most_rows
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


def _try_rows(layers: list[Any], few: FewRows) -> Steps[KernelProbe]:
    """Find the numbers of rows for which the kernel is correct, and faster in total."""
    furthest, reason, slower = 0.0, "", 0
    own_ms, mlx_ms = dict[int, float](), dict[int, float]()
    for rows in _ROWS:
        inputs = [_normal((1, rows, layer.weight.shape[1]), layer.weight.dtype) for layer in layers]
        usual, ours = (partial(_repeat, _trace(layers, few, most), inputs) for most in (0, rows))
        verdict = yield from check(f"products of {rows} rows", "product", usual, ours)
        if not verdict.right:
            reason = f"of {rows} rows {verdict.reason}"
            break
        furthest = max(furthest, verdict.distance)
        own_ms[rows] = 1e3 * verdict.ours_s / _AHEAD
        mlx_ms[rows] = 1e3 * verdict.usual_s / _AHEAD
        slower = 0 if rows == 1 or pays(own_ms[rows], mlx_ms[rows]) else slower + 1
        if slower == _MOST_SLOWER:
            break
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


def _trace(layers: list[Any], few: FewRows, most_rows: int) -> Products:
    """Trace the products of all these layers, by the kernel up to `most_rows` rows."""

    def multiply(inputs: list[mx.array]) -> list[mx.array]:
        few.least, few.most = 1, most_rows
        try:
            with in_trace():
                return [_call(layer, x) for layer, x in zip(layers, inputs, strict=True)]
        finally:
            few.least = few.most = 0

    compiled: Products = mx.compile(multiply)
    return compiled


def _call(layer: Any, x: mx.array) -> mx.array:
    product_of = layer.as_linear if isinstance(layer, nn.Embedding) else layer
    found: mx.array = product_of(x)
    return found


def _normal(shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    return mx.random.normal(shape, dtype, key=mx.random.key(0))
