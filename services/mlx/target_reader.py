"""The part of a drafter that reads the target: keys and values made from the target's states.

For a committed token the drafter need not compute anything itself: a projection of the target's own
hidden states (`services.mlx.taps`) gives its keys and values in every layer. A drafter may also get
the last state as *input*, added to the embedding of the next token; the drafter's own output at a
token is then added to the next one's.

Two files next to the drafter's own weights, which stay an ordinary model: `reads_target.json`
(`ReaderDescription`) and `reads_target.safetensors`.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import msgspec
from mlx.utils import tree_flatten, tree_unflatten

from protocol.errors import ModelError
from protocol.settings import ReadingWay

DESCRIPTION = "reads_target.json"
WEIGHTS = "reads_target.safetensors"


_EPS = 1e-6
_SAMPLE = 64
"""Tokens whose embeddings estimate the size of all."""


class ReaderDescription(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The states that a drafter reads."""

    layers: list[int]
    """Layers whose output is read, from 0."""
    target_width: int
    window: int = 4096
    """Number of positions that are useful to it."""
    way: ReadingWay = "states"
    """States as context only, or the last one as input, too."""


class InputProjection(nn.Module):
    """From a state to an addition to the embedding of the next token: initially zero.

    Adam moves all weights by equal steps, whatever they are multiplied with: the scale keeps the
    addition from swamping the embeddings.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, width, bias=False)
        self.proj.weight = mx.zeros((width, width))
        self.log_scale = mx.zeros(1)

    def __call__(self, state: mx.array) -> mx.array:
        """Project [..., width] to [..., width]."""
        added: mx.array = mx.exp(self.log_scale) * self.proj(mx.fast.rms_norm(state, None, _EPS))
        return added


class TargetReader(nn.Module):
    """From the target's states to keys and values of every layer of a drafter.

    Args:
        features: width of the target's states, all tapped layers concatenated.
        width: of the drafter.
        outputs: per layer of the drafter, (width of its keys, width of its values).
        way: how the drafter reads.
    """

    def __init__(
        self,
        features: int,
        width: int,
        outputs: Sequence[tuple[int, int]],
        way: ReadingWay = "states",
    ) -> None:
        super().__init__()
        self.fc = nn.Linear(features, width, bias=False)
        self.norm = nn.RMSNorm(width)
        self.k_proj = [nn.Linear(width, keys, bias=False) for keys, _ in outputs]
        self.v_proj = [nn.Linear(width, values, bias=False) for _, values in outputs]
        self.enters_input = way == "input"
        """True if the last state is input, too."""
        if self.enters_input:
            self.from_state = InputProjection(width)
            self.from_own = InputProjection(width)

    def rows(
        self, model: Any, features: mx.array, offset: int, *, projected: bool = False
    ) -> list[tuple[mx.array, mx.array]]:
        """Return keys, rotated, and values per layer: [rows, heads, tokens, size].

        Args:
            model: the drafter.
            features: [rows, tokens, features], or the output of `fc` if `projected`.
            offset: position of the first token.
        """
        context = self._fuse(features, projected=projected)
        found = []
        for layer, to_keys, to_values in zip(
            model.model.layers, self.k_proj, self.v_proj, strict=True
        ):
            attention = attention_of(layer)
            heads: int = attention.n_kv_heads
            keys, values = _by_head(to_keys(context), heads), _by_head(to_values(context), heads)
            if hasattr(attention, "k_norm"):
                keys = attention.k_norm(keys)
            found.append((attention.rope(keys, offset=offset), values))
        return found

    def after_state(self, features: mx.array, *, projected: bool = False) -> mx.array:
        """Return the states' addition to the embeddings of the next tokens, [..., width]."""
        return self.from_state(self._fuse(features, projected=projected))

    def after_own(self, hidden: mx.array) -> mx.array:
        """Return the own output's addition where there is no state yet, [..., width]."""
        return self.from_own(hidden)

    def _fuse(self, features: mx.array, *, projected: bool) -> mx.array:
        fused: mx.array = self.norm(features if projected else self.fc(features))
        return fused


class _Embeddings:
    """Wraps a model's embeddings to add something to each token's."""

    def __init__(self, table: Any, added: mx.array) -> None:
        self._table = table
        self._added = added

    def __call__(self, tokens: mx.array) -> mx.array:
        embedded: mx.array = self._table(tokens)
        return embedded + self._added.astype(embedded.dtype)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._table, name)


@contextmanager
def add_to_embeddings(model: Any, added: mx.array) -> Iterator[None]:
    """Add these [rows, length, width] to an mlx-lm model's embeddings inside the context."""
    table = model.model.embed_tokens
    model.model.embed_tokens = _Embeddings(table, added)
    try:
        yield
    finally:
        model.model.embed_tokens = table


def _by_head(x: mx.array, heads: int) -> mx.array:
    return x.reshape(*x.shape[:2], heads, -1).swapaxes(1, 2)


def attention_of(layer: Any) -> Any:
    """Return a layer's attention; raises ModelError if it is not of the usual kind."""
    attention = getattr(layer, "self_attn", None)
    if any(not hasattr(attention, name) for name in ("k_proj", "v_proj", "rope", "n_kv_heads")):
        raise ModelError(
            f"a layer of type {type(layer).__name__} cannot be given keys and values of the "
            "target's: it has no k_proj, v_proj and rope of its own"
        )
    return attention


def read_description(folder: Path) -> ReaderDescription | None:
    """Return what the drafter in `folder` reads; None if it reads nothing.

    Raises:
        ModelError: the description is broken.
    """
    path = folder / DESCRIPTION
    if not path.is_file():
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=ReaderDescription)
    except (OSError, msgspec.DecodeError) as error:
        raise ModelError(f"{str(path)!r} does not say what the drafter reads: {error}") from error


def new_reader(features: int, model: Any, way: ReadingWay = "states") -> TargetReader:
    """Return a reader with random weights for a drafter, an mlx-lm model."""
    attentions = [attention_of(layer) for layer in model.model.layers]
    outputs = [(a.k_proj.weight.shape[0], a.v_proj.weight.shape[0]) for a in attentions]
    width = model.model.norm.weight.shape[0]
    reader = TargetReader(features, width, outputs, way)
    if reader.enters_input:
        embedded = model.model.embed_tokens(mx.arange(_SAMPLE)).astype(mx.float32)
        size = mx.sqrt(mx.mean(embedded * embedded) / width)
        for part in (reader.from_state, reader.from_own):
            part.log_scale = mx.log(size)[None]
    return reader


def load_reader(folder: Path, dtype: mx.Dtype) -> tuple[ReaderDescription, Any] | None:
    """Load the reader of the drafter in `folder`; None if it reads nothing.

    Raises:
        ModelError: a file is broken, or does not fit the drafter.
    """
    description = read_description(folder)
    if description is None:
        return None
    path = folder / WEIGHTS
    try:
        loaded: Any = mx.load(str(path))
        width, features = loaded["fc.weight"].shape
        layers = sum(name.startswith("k_proj.") for name in loaded)
        outputs = [
            tuple(loaded[f"{part}.{layer}.weight"].shape[0] for part in ("k_proj", "v_proj"))
            for layer in range(layers)
        ]
        reader = TargetReader(features, width, outputs, description.way)
        reader.load_weights([(name, array.astype(dtype)) for name, array in loaded.items()])
        mx.eval(reader.parameters())
    except (OSError, RuntimeError, ValueError, KeyError) as error:
        raise ModelError(f"{str(path)!r} is not a reader's: {error}") from error
    if features != len(description.layers) * description.target_width:
        raise ModelError(f"{str(path)!r} reads {features} numbers, and {DESCRIPTION} another count")
    return description, reader


def save_reader(
    folder: Path, description: ReaderDescription, weights: dict[str, mx.array], dtype: mx.Dtype
) -> None:
    """Write both files, the description last, since its presence marks a complete reader."""
    arrays = {name: array.astype(dtype) for name, array in weights.items()}
    mx.save_safetensors(str(folder / WEIGHTS), arrays, {"format": "mlx"})
    (folder / DESCRIPTION).write_bytes(msgspec.json.encode(description))


def flat_parameters(module: nn.Module) -> dict[str, mx.array]:
    """Return a module's parameters by path."""
    flat: Any = tree_flatten(module.parameters())
    return dict(flat)


def update_parameters(module: nn.Module, weights: dict[str, mx.array]) -> None:
    """Set these parameters by path."""
    module.update(tree_unflatten(list(weights.items())))
