"""A head's tensors, and the two ends that it shares with its target."""

from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from protocol.decoding.sampler import Ids
from protocol.errors import ModelError
from protocol.heads import HeadDescription
from services.kernels.register import kernels
from services.mlx.lm_head import FILE_NAME, read_head_ids, rows_of
from services.mlx.loader import LoadedModel, load

Tensors = dict[str, mx.array]

FOREIGN = ("embed_tokens.", "lm_head.", "rotary_emb.", "d2t", "t2d", "verifier_")
"""Prefixes of tensors that are not a head's own layers: its ends, or a target's in training."""


class TargetEnds(NamedTuple):
    """The embedding and output head of the target, without scale or soft cap."""

    embed_tokens: Any
    lm_head: Any
    """Maps states [..., width] to logits [..., vocabulary]."""
    dtype: mx.Dtype
    model: LoadedModel
    """The target without its layers."""


def load_ends(target: Path) -> TargetEnds:
    """Load the embedding and the output head of the target, and no other weights.

    Raises:
        ModelError: the target is broken, or of a family that keeps them elsewhere.
    """
    model = load(target, _drop_layers)
    text: Any = getattr(model.module, "language_model", model.module)
    embedding = text.model.embed_tokens
    head = text.lm_head if "lm_head" in text else embedding.as_linear
    probe: mx.array = embedding(mx.array([0]))
    return TargetEnds(embedding, head, probe.dtype, model)


def _drop_layers(module: Any) -> None:
    text = getattr(module, "language_model", module)
    inner: Any = getattr(text, "model", None)
    if not hasattr(inner, "embed_tokens") or not hasattr(inner, "layers"):
        kind = getattr(module, "model_type", type(module).__name__)
        raise ModelError(f"heads cannot draft for models of type {kind!r}: no model.embed_tokens")
    inner.layers = []


def read_tensors(head: HeadDescription, prefix: str, dtype: mx.Dtype) -> Tensors:
    """Read all tensors whose names start with `prefix`, without it, dequantised.

    Raises:
        ModelError: a file cannot be read.
    """
    names = {name for name in head.tensors if name.startswith(prefix)}
    tensors: Tensors = {}
    for path in sorted({head.files[name] for name in names}):
        try:
            loaded: Any = mx.load(path)
        except (OSError, RuntimeError) as error:
            raise ModelError(f"{path!r} cannot be read: {error}") from error
        tensors |= {name: loaded[name] for name in names if head.files[name] == path}
    plain = _dequantize(tensors, head)
    return {name.removeprefix(prefix): _cast(array, dtype) for name, array in plain.items()}


def _cast(array: mx.array, dtype: mx.Dtype) -> mx.array:
    return array.astype(dtype) if mx.issubdtype(array.dtype, mx.floating) else array


def _dequantize(tensors: Tensors, head: HeadDescription) -> Tensors:
    said: dict[str, Any] = head.config.get("quantization") or {}
    plain: Tensors = {}
    for name, array in tensors.items():
        layer, _, leaf = name.rpartition(".")
        if f"{layer}.scales" not in tensors:
            plain[name] = array
        elif leaf == "weight":
            own = said.get(layer)
            how = own if isinstance(own, dict) else said
            try:
                plain[name] = mx.dequantize(
                    array,
                    tensors[f"{layer}.scales"],
                    tensors.get(f"{layer}.biases"),
                    group_size=int(how["group_size"]),
                    bits=int(how["bits"]),
                )
            except (KeyError, ValueError) as error:
                raise ModelError(
                    f"the head's tensor {name!r} cannot be unpacked: {error}"
                ) from error
    return plain


def head_dtype(ends: TargetEnds) -> mx.Dtype:
    """Return the dtype that a head computes in: its target's, float32 on a CPU."""
    return ends.dtype if kernels().on_gpu else mx.float32


def fill(module: Any, tensors: Tensors, head: HeadDescription) -> None:
    """Load the tensors into a head's module.

    Raises:
        ModelError: one is missing, or of another shape.
    """
    try:
        module.load_weights(list(tensors.items()), strict=True)
        mx.eval(module.parameters())
    except ValueError as error:
        said = " ".join(str(error).split())[:300]
        raise ModelError(
            f"the head {head.folder!r} does not match the format {head.format}: {said}"
        ) from error


def read_ids(tensors: Tensors, head: HeadDescription) -> Ids:
    """Return the target's id of each row of the head's own output: row i is token i + d2t[i].

    Raises:
        ModelError: the list does not fit the head and the target.
    """
    if "d2t" not in tensors:
        return np.arange(tensors["lm_head.weight"].shape[0])
    offsets: Ids = np.array(tensors["d2t"]).astype(np.int64)
    ids: Ids = np.arange(len(offsets)) + offsets
    rows = tensors["lm_head.weight"].shape[0]
    if rows != len(ids) or ids.min() < 0 or ids.max() >= head.vocabulary_size:
        raise ModelError(
            f"the head {head.folder!r} has a d2t of {len(ids)} entries up to token {ids.max()} "
            f"for {rows} rows and a vocabulary of {head.vocabulary_size}"
        )
    return ids


def trim_ends(
    head: HeadDescription, ends: TargetEnds, tensors: Tensors
) -> tuple[Any, Any, Ids | None]:
    """Return embedding, output head, and the token ids of its columns.

    They are the head's own if it has them, otherwise the target's, with only the rows of the output
    head that `draft_head.json` in the head's folder lists, if there is one.
    """
    embedding = ends.embed_tokens
    if "embed_tokens.weight" in tensors:
        embedding = nn.Embedding(1, 1)
        embedding.weight = tensors["embed_tokens.weight"]
    if "lm_head.weight" in tensors:
        return embedding, _linear(tensors["lm_head.weight"]), read_ids(tensors, head)
    path = Path(head.folder) / FILE_NAME
    if not path.exists():
        return embedding, ends.lm_head, None
    ids = read_head_ids(path, head.vocabulary_size)
    text: Any = getattr(ends.model.module, "language_model", ends.model.module)
    rows = rows_of(text.lm_head if "lm_head" in text else ends.embed_tokens, ids)
    return embedding, _linear(rows), ids


def _linear(weight: mx.array) -> Any:
    layer = nn.Linear(1, 1, bias=False)
    layer.weight = weight
    mx.eval(weight)
    return layer
