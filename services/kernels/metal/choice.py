"""The Metal kernels that a model uses: test results, and layers that call them.

Off until `use_kernels` is called, and always where there is no Metal. Attention is tested when a
model first needs it, since its shape is unknown before.
"""

import functools
import logging
import re
from collections import defaultdict
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from protocol.jobs.kernel_report import KernelProbe, KernelReport
from protocol.settings import MetalKernels
from services.kernels.metal import attention, product
from services.kernels.metal.probe import AttentionKind, probe_attention, probe_product
from services.kernels.metal.product import Quantised
from services.mlx.loader import compute_unit
from services.mlx.patches import Patch, install, remove_all
from services.runtime.preparation import Steps

_log = logging.getLogger(__name__)

_FIRST_WITH_ACCELERATORS = 5
"""First generation of M chips whose GPUs have matrix units, which MLX uses and these kernels do
not.
"""
_LAYERS = 4
"""Layers per shape, whose weights are read in turn when timed."""


@dataclass
class KernelsInUse:
    """Results of the self-tests of a model's kernels."""

    always: bool = False
    """True to use whatever is correct, faster or not."""
    note: str = ""
    products: list[KernelProbe] = field(default_factory=list)
    attention: dict[AttentionKind, KernelProbe] = field(default_factory=dict)

    def try_attention(self, shape: AttentionKind) -> int:
        """Return the fewest queries for which our kernel attends in this shape; 0 means never."""
        if shape.size not in attention.SIZES or shape.dtype not in attention.TYPES:
            return 0
        if shape not in self.attention:
            self.attention[shape] = probe_attention(shape, always=self.always)
        return self.attention[shape].least_rows

    def report(self) -> KernelReport:
        """Report the test results so far."""
        return KernelReport(note=self.note, probes=[*self.products, *self.attention.values()])


_running: ContextVar[KernelsInUse | None] = ContextVar("running", default=None)
"""Kernels of the model whose pass is being built."""


@dataclass(frozen=True)
class _Served:
    """Shape and type of a layer's calls."""

    weights: Quantised
    least_rows: int

    def takes(self, x: mx.array) -> bool:
        return x.size >= self.least_rows * x.shape[-1] and product.takes(x, self.weights)


class FewRowsLinear(nn.QuantizedLinear):
    """A quantised layer whose few rows use our kernel."""

    served: _Served

    def __call__(self, x: mx.array) -> mx.array:
        """[..., rows, inputs] -> [..., rows, outputs]."""
        if not self.served.takes(x):
            by_mlx: mx.array = super().__call__(x)
            return by_mlx
        found = product.multiply(x, self.served.weights)
        return found + self["bias"] if "bias" in self else found


class FewRowsEmbedding(nn.QuantizedEmbedding):
    """A tied embedding whose logits of few rows use our kernel."""

    served: _Served

    def as_linear(self, x: mx.array) -> mx.array:
        """Logits of [..., rows, inputs]."""
        if not self.served.takes(x):
            by_mlx: mx.array = super().as_linear(x)
            return by_mlx
        return product.multiply(x, self.served.weights)


_LAYERS_OF_OURS = {nn.QuantizedLinear: FewRowsLinear, nn.QuantizedEmbedding: FewRowsEmbedding}


def _serve_few_rows(plain: type) -> type:
    return _LAYERS_OF_OURS[plain]


@functools.cache
def _attend_in(plain: type) -> type:
    """Derive the class of a model whose passes use our attention."""

    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        before = _running.set(self.kernels_in_use)
        try:
            return plain.__call__(self, *arguments, **named)
        finally:
            _running.reset(before)

    return type(f"FewRows{plain.__name__}", (plain,), {"__call__": call})


def use_kernels(model: Any, mode: MetalKernels) -> Steps[KernelsInUse]:
    """Use the kernels in a model on Metal that are correct and faster, or all that are correct.

    Replaces the choice of an earlier call. Does nothing on other devices.
    """
    remove_all(model, _serve_few_rows, _attend_in)
    used = KernelsInUse(always=mode == "on")
    if compute_unit() != "metal" or mode == "off":
        return used
    module: Any = mx  # it lacks type hints
    name = str(module.device_info().get("device_name", ""))
    chip = re.search(r"\bM(\d+)", name)
    if mode == "auto" and chip is not None and int(chip[1]) >= _FIRST_WITH_ACCELERATORS:
        used.note = (
            f"not used on {name}, whose GPU multiplies matrices in units of its own; "
            "`metal_kernels=on` uses them"
        )
        _log.info("kernels for few rows: %s", used.note)
        return used
    install([Patch(model, _attend_in, {"kernels_in_use": used})])
    by_shape = defaultdict[Any, list[tuple[Any, Quantised]]](list)
    for _, layer in model.named_modules():
        if type(layer) in _LAYERS_OF_OURS and (own := product.weights_of(layer)) is not None:
            key = (own.weight.shape, own.group_size, own.bits, own.scales.dtype)
            by_shape[key].append((layer, own))
    for layers in by_shape.values():
        used.products.append(_use_product(layers, always=used.always))
        yield
    return used


def _use_product(layers: list[tuple[Any, Quantised]], *, always: bool) -> KernelProbe:
    some = [own for _, own in layers[:_LAYERS]]
    mx.eval(some)
    probe = probe_product(some, always=always)
    if probe.least_rows:
        install(
            Patch(layer, _serve_few_rows, {"served": _Served(own, probe.least_rows)})
            for layer, own in layers
        )
    counted = {name: getattr(probe, name) for name in probe.__struct_fields__}
    return KernelProbe(**{**counted, "layers": len(layers)})


def attend(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: mx.array | str | None
) -> mx.array | None:
    """Compute [1, heads, n, size] attention, or return None where MLX's own kernels are better.

    See `attention.attend` for the arguments.
    """
    used = _running.get()
    if used is None or not attention.takes(queries, keys, values, mask):
        return None
    _, heads, count, size = queries.shape
    least = used.try_attention(AttentionKind(heads, keys.shape[1], size, queries.dtype))
    return attention.attend(queries, keys, values, scale, mask) if 0 < least <= count else None
