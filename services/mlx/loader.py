"""Loading any mlx-lm model folder for this project: dtype, identity, context length."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import msgspec
import psutil
from mlx.utils import tree_flatten, tree_map
from mlx_lm.utils import load_model

from protocol.decoding.vocabulary import Vocabulary, read_vocabulary
from protocol.errors import ModelError


class LoadedModel(NamedTuple):
    """A model in memory and what its folder says about it."""

    module: Any
    """The mlx-lm model; called as module(tokens[1, n], cache=caches) -> logits[1, n, V]."""
    folder: Path
    vocabulary: Vocabulary
    context_length: int


def compute_unit() -> str:
    """Where MLX computes in this process: "cpu", "metal" or "cuda"."""
    if mx.default_device() == mx.cpu:
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


def load(folder: Path, shard: Callable[[Any], None] | None = None) -> LoadedModel:
    """Load the model in `folder`.

    On a CPU the weights become float32, because MLX's quantised and half-precision kernels
    are slow there; elsewhere they stay in the checkpoint's own format. `shard` is called before
    any weight is read, to leave only a part of the model.

    Raises:
        ModelError: the folder is missing, broken, of an unknown architecture, or too large.
    """
    if not folder.is_dir():
        raise ModelError(f"there is no model folder at {str(folder)!r}")
    if not (folder / "config.json").is_file():
        raise ModelError(f"the model folder {str(folder)!r} has no config.json")
    _refuse_code(folder)
    vocabulary = read_vocabulary(folder)
    module, config = _load(folder, shard)
    return LoadedModel(module, folder, vocabulary, _context_length(config, folder))


def _refuse_code(folder: Path) -> None:
    """A model folder is data: one that brings Python of its own is not loaded.

    Some versions of mlx-lm execute the file that `model_file` names without asking.
    """
    try:
        config = msgspec.json.decode((folder / "config.json").read_bytes(), type=dict[str, Any])
    except (OSError, UnicodeDecodeError, msgspec.DecodeError) as error:
        raise ModelError(f"config.json in {str(folder)!r} is not JSON: {error}") from error
    if "model_file" in config:
        raise ModelError(
            f"the model {str(folder)!r} needs to run its own code "
            f"({str(config['model_file'])[:100]!r}); such models are not loaded"
        )


def _load(folder: Path, shard: Callable[[Any], None] | None) -> tuple[Any, dict[str, Any]]:
    on_cpu = compute_unit() == "cpu"
    try:
        module, config = load_model(folder, lazy=True)
        if on_cpu:
            to_dense(module, mx.float32)
        if shard is not None:
            shard(module)
        _check_memory(module, folder)
        mx.eval(module.parameters())
    except ModelError:
        raise
    except MemoryError as error:
        raise ModelError(f"not enough memory to load the model {str(folder)!r}") from error
    except json.JSONDecodeError as error:
        raise ModelError(f"config.json in {str(folder)!r} is not JSON: {error}") from error
    # mlx-lm and MLX raise whatever the broken file leads them into.
    except Exception as error:
        raise ModelError(
            f"cannot load the model {str(folder)!r}: {type(error).__name__}: {_one_line(error)}"
        ) from error
    return module, config


def _check_memory(module: nn.Module, folder: Path) -> None:
    """Refuse a model that does not fit, before the system starts to kill processes."""
    parameters: Any = tree_flatten(module.parameters())
    needed = sum(array.nbytes for _, array in parameters)
    free = psutil.virtual_memory().available
    if needed > free:
        raise ModelError(
            f"not enough memory for the model {str(folder)!r}: "
            f"it needs {needed / 1e9:.1f} GB and {free / 1e9:.1f} GB are free"
        )


def _one_line(error: Exception) -> str:
    lines = str(error).split() or ["no reason given"]
    return " ".join(lines)[:300]


def to_dense(module: nn.Module, dtype: mx.Dtype) -> None:
    """Replace quantised layers by plain ones and give every floating weight this type."""

    def plain(layer: Any) -> Any:
        if not hasattr(layer, "scales"):
            return layer
        weight = mx.dequantize(
            layer.weight,
            layer.scales.astype(mx.float32) if layer.mode == "affine" else layer.scales,
            layer.biases.astype(mx.float32) if layer.mode == "affine" else None,
            group_size=layer.group_size,
            bits=layer.bits,
            mode=layer.mode,
        )
        rows, columns = weight.shape
        if isinstance(layer, nn.QuantizedEmbedding):
            replacement: Any = nn.Embedding(1, 1)
        else:
            replacement = nn.Linear(1, 1, bias="bias" in layer)
            if "bias" in layer:
                replacement.bias = layer.bias
        replacement.weight = weight.reshape(rows, columns)
        return replacement

    leaves = tree_map(plain, module.leaf_modules(), is_leaf=nn.Module.is_module)
    module.update_modules(leaves)
    module.update(
        tree_map(
            lambda w: w.astype(dtype) if mx.issubdtype(w.dtype, mx.floating) else w,
            module.parameters(),
        )
    )


def _context_length(config: dict[str, Any], folder: Path) -> int:
    text = config.get("text_config") or config
    length = text.get("max_position_embeddings") or 0
    if not isinstance(length, int) or length < 0:
        raise ModelError(
            f"config.json in {str(folder)!r} has max_position_embeddings {length!r}, "
            "which is not a number of tokens"
        )
    return length
