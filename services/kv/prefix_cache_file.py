"""The target's prompt cache in a file, so that it outlives the process (`--prompt-cache-file`).

A safetensors file: per sequence its tokens, and the arrays of its state. The metadata identifies
the model and settings that computed them, and holds a checksum. Any other state would change
answers, so a file that does not match exactly is not used.
"""

import contextlib
import hashlib
import json
import logging
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from protocol.process.child import exit_on_sigterm
from protocol.process.files import atomic_writer, remove_leftovers
from services.kernels.register import kernels
from services.kv.dump_check import check_dump, sample_dumps
from services.kv.prefix_cache import CachedPrefix, PrefixCache
from services.kv.state import SequenceState
from services.mlx.loader import LoadedModel

_log = logging.getLogger(__name__)

_FORMAT = "2"
_SAMPLES, _SAMPLE_BYTES = 64, 65536
_SUFFIXES = (".safetensors", ".gguf")

_UNUSABLE = (OSError, RuntimeError, ValueError, KeyError, TypeError, IndexError)
"""Errors that a truncated or foreign file, or a full disk, causes in MLX and here."""


@contextlib.contextmanager
def persist_prefixes(
    path: Path,
    prompts: PrefixCache,
    model: LoadedModel,
    how: str,
    new_state: Callable[[], SequenceState],
    *,
    retire: Callable[[], None],
) -> Iterator[None]:
    """Load the prefixes of an earlier process from a file; save the present ones on exit.

    Args:
        path: of the file.
        prompts: the cache.
        model: the target.
        how: describes everything besides the model that changes its KV.
        new_state: creates an empty state for a sequence.
        retire: moves the open sequences to the cache.
    """
    identity = identify_kv(model, how)
    load(path, prompts, identity, model.module, new_state)
    try:
        with exit_on_sigterm():
            yield
    finally:
        retire()
        save(path, prompts, identity)


def identify_kv(model: LoadedModel, how: str) -> str:
    """Return the identity of this model's KV; `how` describes what else changes it.

    Weights are identified by size, date and samples: reading all of a large model takes too long.
    """
    digest = hashlib.sha256((model.folder / "config.json").read_bytes())
    for path in sorted(model.folder.iterdir()):
        if path.suffix in _SUFFIXES:
            status = path.stat()
            digest.update(f"{path.name}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
            with path.open("rb") as file:
                for part in range(_SAMPLES):
                    file.seek(status.st_size * part // _SAMPLES)
                    digest.update(file.read(_SAMPLE_BYTES))
    parameters: Any = tree_flatten(model.module.parameters())
    types = sorted({str(array.dtype) for _, array in parameters})
    return json.dumps([digest.hexdigest(), types, kernels().device, how])


def save(path: Path, prompts: PrefixCache, identity: str) -> None:
    """Write all prefixes, if there are any; the file is replaced atomically.

    It holds prompts, so only its owner may read it. A failure is only logged.
    """
    remove_leftovers(path.parent, path.name)
    try:
        arrays = dict(_iter_arrays(prompts.kept))
        if not arrays:
            return
        mx.eval(list(arrays.values()))
        metadata = {"ssd": _FORMAT, "identity": identity, "checksum": _checksum(arrays)}
        with atomic_writer(path, sync=True) as file:
            mx.save_safetensors(file, arrays, metadata)
    except _UNUSABLE as error:
        _log.warning("the prompt cache was not saved to %s: %s", path, error)
        return
    _log.info("the KV of %d sequences was saved to %s", len(prompts), path)


def load(
    path: Path,
    prompts: PrefixCache,
    identity: str,
    module: Any,
    new_state: Callable[[], SequenceState],
) -> None:
    """Load the saved prefixes; an unusable file is only logged."""
    remove_leftovers(path.parent, path.name)
    if not path.exists():
        return
    try:
        prefixes = _read(path, identity, module, new_state)
    except _UNUSABLE as error:
        _log.warning("the prompt cache in %s is not used: %s", path, error)
        return
    for held in prefixes:
        prompts.keep(held)
    _log.info("the KV of %d sequences was read from %s", len(prompts), path)


def _iter_arrays(kept: Iterable[CachedPrefix]) -> Iterator[tuple[str, mx.array]]:
    for number, held in enumerate(kept):
        length = held.state.resumable(len(held.tokens))
        yield f"{number}.tokens", mx.array(held.tokens[:length], dtype=mx.int32)
        for name, array in held.state.dump(length).items():
            yield f"{number}.{name}", array


def _read(
    path: Path, identity: str, module: Any, new_state: Callable[[], SequenceState]
) -> list[CachedPrefix]:
    loaded: Any = mx.load(str(path), format="safetensors", return_metadata=True)
    arrays: dict[str, mx.array] = loaded[0]
    metadata: dict[str, str] = loaded[1]
    if metadata.get("ssd") != _FORMAT:
        raise ValueError("it is not a prompt cache of this version")
    if metadata.get("identity") != identity:
        raise ValueError("it is of another model, or was computed in another way")
    mx.eval(list(arrays.values()))
    if metadata.get("checksum") != _checksum(arrays):
        raise ValueError("it is damaged")
    samples = sample_dumps(module, new_state)
    prefixes: list[CachedPrefix] = []
    while f"{len(prefixes)}.tokens" in arrays:
        prefix = f"{len(prefixes)}."
        tokens: Any = arrays.pop(f"{prefix}tokens").tolist()
        dump = {n.removeprefix(prefix): a for n, a in arrays.items() if n.startswith(prefix)}
        check_dump(dump, samples)
        state = new_state()
        state.load(dump)
        state.evaluate()
        if state.length != len(tokens):
            raise ValueError(f"it holds {state.length} of {len(tokens)} tokens")
        prefixes.append(CachedPrefix(tokens, state))
    return prefixes


def _checksum(arrays: dict[str, mx.array]) -> str:
    """Return a checksum of names and contents, in sorted order."""
    checksum = 0
    for name in sorted(arrays):
        checksum = zlib.crc32(name.encode(), checksum)
        content: Any = mx.view(arrays[name], mx.uint8)
        checksum = zlib.crc32(memoryview(content), checksum)
    return f"{checksum:08x}"
