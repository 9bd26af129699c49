"""A target that costs what a larger one costs, and computes what it did before.

For measurements only: a small target with its real acceptance, at the price of a 3B, 8B or
70B one. Decoder layers of the larger model's shape are appended: their weights are read,
their attention runs over caches of their own, every kernel is a real one. Their output
projections are zero, so nothing is added to the target's own stream, and the logits stay
what they were, bit for bit, which is checked here.
"""

from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import psutil
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.llama import ModelArgs, TransformerBlock

from protocol.errors import ModelError
from protocol.jobs.cost_emulation import EmulatedSize
from services.mlx.loader import compute_unit

_ROPE_BASE = 500_000.0


class ModelShape(NamedTuple):
    """One decoder layer."""

    name: str
    layers: int
    """How many of them the model has whose shape this is."""
    width: int
    mlp: int
    heads: int
    kv_heads: int
    head_size: int

    @property
    def parameters(self) -> int:
        """Of one layer, norms left out."""
        attention = self.width * self.head_size * 2 * (self.heads + self.kv_heads)
        return attention + 3 * self.width * self.mlp


# From the published configurations of Llama 3 and Qwen 2.5.
SHAPES = (
    ModelShape("SmolLM2-135M", 30, 576, 1536, 9, 3, 64),
    ModelShape("Qwen2.5-0.5B", 24, 896, 4864, 14, 2, 64),
    ModelShape("Llama-3.2-1B", 16, 2048, 8192, 32, 8, 64),
    ModelShape("Llama-3.2-3B", 28, 3072, 8192, 24, 8, 128),
    ModelShape("Llama-3.1-8B", 32, 4096, 14336, 32, 8, 128),
    ModelShape("Qwen2.5-14B", 48, 5120, 13824, 40, 8, 128),
    ModelShape("Qwen2.5-32B", 64, 5120, 27648, 40, 8, 128),
    ModelShape("Llama-3.1-70B", 80, 8192, 28672, 64, 8, 128),
)


class _Stream:
    """What the added layers of one model share while a forward runs."""

    def __init__(self) -> None:
        self.own: mx.array | None = None
        """The target's own hidden state, kept aside."""
        self.passes = 0


class _Added(nn.Module):
    """A layer beside the target's stream: the first widens it, the last gives it back."""

    def __init__(self, block: Any, stream: _Stream, *, first: bool, last: bool) -> None:
        super().__init__()
        self.block = block
        self._stream = stream
        self._first = first
        self._last = last
        # Some models choose a layer's mask by these.
        self.use_sliding = False
        self.is_sliding = False

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        """[1, tokens, width of the target or of the shape] -> the same."""
        if self._first:
            self._stream.own = x
            x = self._widen(x)
        x = self.block(x, mask, cache)
        if self._last and self._stream.own is not None:
            own, self._stream.own = self._stream.own, None
            self._stream.passes += 1
            if "exit" not in self:
                self.exit = mx.zeros((x.shape[-1], own.shape[-1]), x.dtype)
            return own + (x @ self.exit).astype(own.dtype)
        return x

    def _widen(self, x: mx.array) -> mx.array:
        norm = self.block.input_layernorm.weight
        kept = x[..., : norm.size].astype(norm.dtype)
        return mx.pad(kept, [(0, 0), (0, 0), (0, norm.size - kept.shape[-1])])


def emulate(module: Any, size: EmulatedSize) -> str:
    """Make the model cost what one of this size costs; returns what was done, in words.

    Raises:
        ModelError: the size is not above the model's own, does not fit into memory, or the
            model is built in a way that cannot be extended without changing its logits.
    """
    dtype = mx.float32 if compute_unit() == "cpu" else mx.bfloat16
    weights: Any = tree_flatten(module.parameters())
    nbytes = sum(w.nbytes for _, w in weights)
    wanted = size.bytes_to_add(sum(w.size for _, w in weights), nbytes, dtype.size)
    if wanted <= 0:
        raise ModelError(
            f"cannot emulate a target of {size.amount:g}{size.unit}: "
            f"the model itself is not smaller ({nbytes / 1e9:.2f} GB)"
        )
    shape = min(SHAPES, key=lambda s: _ratio(wanted / dtype.size, s.layers * s.parameters))
    count = max(1, round(wanted / (shape.parameters * dtype.size)))
    added = count * shape.parameters * dtype.size
    _check_memory(added)
    _extend(module, shape, count, dtype)
    return (
        f"{size.amount:g}{size.unit}: {count} layers of the shape of {shape.name} added, "
        f"{(added + nbytes) / 1e9:.1f} GB of weights in all"
    )


def _ratio(a: float, b: float) -> float:
    return max(a / b, b / a)


def _check_memory(needed: float) -> None:
    if compute_unit() == "cuda":
        info: dict[str, Any] = mx.device_info()
        free = float(info.get("free_memory", info.get("total_memory", needed)))
    else:
        free = psutil.virtual_memory().available
    if needed > free:
        raise ModelError(
            f"cannot emulate this target: its {needed / 1e9:.1f} GB of added weights "
            f"do not fit into {free / 1e9:.1f} GB of memory"
        )


def _extend(module: Any, shape: ModelShape, count: int, dtype: mx.Dtype) -> None:
    probe = mx.arange(1, 9)[None]
    before = module(probe)
    mx.eval(before)
    stream = _Stream()
    template = _block(shape, dtype)
    try:
        for index in range(count):
            first, last = index == 0, index == count - 1
            layer = _Added(_copy(template), stream, first=first, last=last)
            mx.eval(layer.parameters())
            # What `module.layers` gives may be a slice of it.
            module.model.layers.append(layer)
        if hasattr(module.args, "num_hidden_layers"):  # some models count their caches by it
            module.args.num_hidden_layers += count
        same = mx.array_equal(before, module(probe)).item()
        caches = make_prompt_cache(module)
    # Whatever a model of another make stumbles over.
    except Exception as error:
        raise ModelError(f"the cost of this target cannot be emulated: {error}") from error
    if not same or stream.passes != 1 or len(caches) != len(module.layers):
        raise ModelError(
            "the cost of this target cannot be emulated: layers cannot be added to it "
            "without changing what it computes"
        )


def _block(shape: ModelShape, dtype: mx.Dtype) -> nn.Module:
    """A decoder layer of random weights whose output projections are zero."""
    block: nn.Module = TransformerBlock(
        ModelArgs(
            model_type="llama",
            hidden_size=shape.width,
            num_hidden_layers=shape.layers,
            intermediate_size=shape.mlp,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            head_dim=shape.head_size,
            rms_norm_eps=1e-5,
            vocab_size=1,
            rope_theta=_ROPE_BASE,
        )
    )
    for projection in (block.self_attn.o_proj, block.mlp.down_proj):
        projection.weight = mx.zeros_like(projection.weight)
    block.set_dtype(dtype)
    return block


def _copy(template: Any) -> Any:
    """The same layer in memory of its own, so that its weights are read for it alone."""
    layer = TransformerBlock(template.args)
    layer.update(
        tree_map(lambda weight: weight + mx.zeros((), weight.dtype), template.parameters())
    )
    return layer
