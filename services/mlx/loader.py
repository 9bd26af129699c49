"""Load any mlx-lm model folder: dtype, identity, context length."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import msgspec
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache
from mlx_lm.utils import load_model

from protocol.decoding.vocabulary import Vocabulary, read_vocabulary
from protocol.errors import ModelError
from protocol.process.free_memory import free_memory


class LoadedModel(NamedTuple):
    """A loaded model and the facts from its folder."""

    module: Any
    """The mlx-lm model; called as module(tokens[1, n], cache=caches) -> logits[1, n, V]."""
    folder: Path
    vocabulary: Vocabulary
    context_length: int
    end_ids: frozenset[int] = frozenset()
    """Tokens that end an answer, and in most chat templates every message."""


def compute_unit() -> str:
    """Return the kind of device MLX computes on in this process: "cpu", "metal" or "cuda"."""
    if mx.default_device() == mx.cpu:
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


def load(
    folder: Path,
    shard: Callable[[Any], None] | None = None,
    adapter: str = "",
    *,
    as_stored: Callable[[Any], bool] | None = None,
) -> LoadedModel:
    """Load the model in `folder`.

    On a CPU the weights become float32, because MLX's quantised and half-precision kernels are
    slow there. On a GPU, and where kernels of our own take them, they stay in the checkpoint's
    format.

    Args:
        folder: in mlx-lm's format.
        shard: called with the module before any weight is read, to keep only a part of it.
        adapter: folder of a LoRA adapter for it; empty: none.
        as_stored: tests if CPU kernels take the model; its weights then stay unread, in the format
            of the file (`services.kernels.cpu.equip.takes`).

    Raises:
        ModelError: a folder is missing, broken, of an unknown architecture, or too large.
    """
    if not folder.is_dir():
        raise ModelError(f"there is no model folder at {str(folder)!r}")
    if not (folder / "config.json").is_file():
        raise ModelError(f"the model folder {str(folder)!r} has no config.json")
    _refuse_code(folder)
    vocabulary = read_vocabulary(folder)
    module, config = _load(folder, shard, adapter, as_stored=as_stored)
    length = _context_length(config, folder)
    return LoadedModel(module, folder, vocabulary, length, _end_ids(config))


def windows_of(model: Any) -> list[int | None]:
    """Return the attention window of each layer of an mlx-lm model, None for full attention.

    Raises:
        ModelError: a layer keeps something else (a recurrent state, chunks, ...).
    """
    windows: list[int | None] = []
    for cache in make_prompt_cache(model):
        if type(cache) is KVCache:
            windows.append(None)
        elif type(cache) is RotatingKVCache and cache.keep == 0:
            windows.append(cache.max_size)
        else:
            raise ModelError(
                f"a layer keeps its state in a {type(cache).__name__}: such models verify drafts, "
                "but cannot draft or be distilled"
            )
    return windows


def load_skeleton(folder: Path) -> Any:
    """Return the module without reading its weights, configured like `load`'s.

    Raises:
        ModelError: it cannot be loaded.
    """
    _refuse_code(folder)
    try:
        module, _ = load_model(folder, lazy=True)
    # mlx-lm and MLX raise errors of any kind for a broken file.
    except Exception as error:
        raise ModelError(f"cannot load the model {str(folder)!r}: {_one_line(error)}") from error
    if compute_unit() == "cpu":
        to_dense(module, mx.float32)
    return module


def _refuse_code(folder: Path) -> None:
    """Refuse a model folder that brings Python code: a folder is data.

    Some versions of mlx-lm execute the file named by `model_file` without asking.
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


def _load(
    folder: Path,
    shard: Callable[[Any], None] | None,
    adapter: str,
    *,
    as_stored: Callable[[Any], bool] | None,
) -> tuple[Any, dict[str, Any]]:
    on_cpu = compute_unit() == "cpu"
    try:
        module, config = load_model(folder, lazy=True)
        if adapter:
            _adapt(module, Path(adapter))
        stored = on_cpu and as_stored is not None and as_stored(module)
        if on_cpu and not stored:
            to_dense(module, mx.float32)
        if shard is not None:
            shard(module)
        _check_memory(module, folder)
        if not stored:
            mx.eval(module.parameters())
    except ModelError:
        raise
    except MemoryError as error:
        raise ModelError(f"not enough memory to load the model {str(folder)!r}") from error
    except json.JSONDecodeError as error:
        raise ModelError(f"config.json in {str(folder)!r} is not JSON: {error}") from error
    # mlx-lm and MLX raise errors of any kind for a broken file.
    except Exception as error:
        raise ModelError(
            f"cannot load the model {str(folder)!r}: {type(error).__name__}: {_one_line(error)}"
        ) from error
    return module, config


def _adapt(module: nn.Module, adapter: Path) -> None:
    """Add the adapter's layers, as mlx-lm does, and put the module in evaluation mode.

    They are not merged into the weights: with quantised ones the result would be another model.
    """
    from mlx_lm.tuner.utils import load_adapters  # noqa: PLC0415  # heavy, rarely needed

    try:
        load_adapters(module, str(adapter))
        module.eval()
    # mlx-lm and MLX raise errors of any kind for a broken file.
    except Exception as error:
        raise ModelError(
            f"cannot use the adapter {str(adapter)!r} with this model: "
            f"{type(error).__name__}: {_one_line(error)}"
        ) from error


def _check_memory(module: nn.Module, folder: Path) -> None:
    """Refuse a model that does not fit in memory, before the system kills processes for it."""
    parameters: Any = tree_flatten(module.parameters())
    needed = sum(array.nbytes for _, array in parameters)
    free = free_memory()
    if needed > free.bytes:
        raise ModelError(
            f"not enough memory for the model {str(folder)!r}: "
            f"it needs {needed / 1e9:.1f} GB and {free.limit} leaves {free.bytes / 1e9:.1f} GB"
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


def _end_ids(config: dict[str, Any]) -> frozenset[int]:
    """Read `eos_token_id`, wherever it is; mlx-lm has copied generation_config.json's."""
    ids: set[int] = set()
    for part in (config, config.get("text_config") or {}):
        value = part.get("eos_token_id")
        ids.update(one for one in (value if isinstance(value, list) else [value]) if one)
    return frozenset(ids)


def _context_length(config: dict[str, Any], folder: Path) -> int:
    text = config.get("text_config") or config
    length = text.get("max_position_embeddings") or 0
    if not isinstance(length, int) or length < 0:
        raise ModelError(
            f"config.json in {str(folder)!r} has max_position_embeddings {length!r}, "
            "which is not a number of tokens"
        )
    return length
