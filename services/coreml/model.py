"""A converted model on its host: tokens in, best tokens out. Handles slots, not sequences.

A call feeds tokens to consecutive slots and specifies, for each, its position, the slots that it
attends to and the tokens of the same call that it attends to.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from protocol.decoding.sampler import Floats
from protocol.errors import ModelError
from protocol.settings import ComputeUnits
from services.coreml.architecture import Rope
from services.coreml.functions import MASKED, PackageFunction
from services.coreml.manifest import EMBEDDING, Manifest, read_manifest
from services.coreml.runtime.blob import Array
from services.coreml.runtime.executor import PackageExecutor, State, executor_of
from services.sampling.candidates import Top

Visible = npt.NDArray[np.bool_]

_SPARE_POSITIONS = 256
"""Branches may extend beyond the last slot: a position is not a slot."""


class Feed(NamedTuple):
    """The tokens of one call."""

    tokens: Sequence[int]
    positions: Sequence[int]
    slot: int
    """Slot of the first token's keys and values; the others' follow."""
    cache: Visible
    """[tokens, slots] slots each token attends to."""
    new: Visible
    """[tokens, tokens] tokens of this call it attends to."""


class ConvertedModel:
    """The model in a converted folder."""

    def __init__(self, folder: Path, executor: PackageExecutor) -> None:
        """Map the embedding; raises ModelError if the folder is incomplete."""
        self.folder = folder
        self.manifest: Manifest = read_manifest(folder)
        self.executor = executor
        try:
            self._embedding = np.load(folder / EMBEDDING, mmap_mode="r")
        except (OSError, ValueError) as error:
            raise ModelError(f"{str(folder)!r} has no readable {EMBEDDING} ({error})") from error
        shape = self.manifest.architecture
        self._window = shape.window
        ropes = {"": shape.rope, "_local": shape.local_rope}
        self._tables = {
            f"{table}{layers}": values.astype(np.float16)
            for layers, rope in ropes.items()
            if rope is not None
            for table, values in zip(("cos", "sin"), self._tables_of(rope), strict=True)
        }
        ids = self.manifest.head_ids
        self._head_ids = np.array(ids, np.int64) if ids else None

    def _tables_of(self, rope: Rope) -> tuple[Floats, Floats]:
        return rope.tables(self.slots + _SPARE_POSITIONS)

    @property
    def slots(self) -> int:
        """Number of rows of the state."""
        return self.manifest.slots

    def new_state(self) -> list[State]:
        """Return an empty state, one element per part."""
        return [self.executor.new_state(part) for part in range(len(self.manifest.parts))]

    def run(self, name: str, feed: Feed, state: list[State]) -> list[Top]:
        """Call a stateful function; return the best tokens after each token, if it has a head.

        Raises:
            ValueError: the call does not fit: too many tokens, or slots that do not exist.
        """
        function = self.manifest.function(name)
        self._check(function, feed)
        inputs = self._inputs(function, feed) | self._write_inputs(function, feed)
        outputs: dict[str, Array] = {}
        for part in range(len(self.manifest.parts)):
            outputs = self.executor.run(part, name, inputs, state[part])
            inputs["x"] = outputs.get("hidden", inputs["x"])
        return self._tops(outputs, len(feed.tokens)) if function.head else []

    def keys_values(
        self, name: str, feed: Feed, past: list[tuple[Array, Array]]
    ) -> list[tuple[Array, Array]]:
        """Call a stateless function; return per part the new [layers, kv_heads, tokens, head_dim].

        `past` is the preceding part, [layers, kv_heads, slots, head_dim].
        """
        function = self.manifest.function(name)
        self._check(function, feed)
        inputs = self._inputs(function, feed)
        rows = []
        for part, (keys, values) in enumerate(past):
            given = inputs | {"past_keys": keys, "past_values": values}
            outputs = self.executor.run(part, name, given, None)
            inputs["x"] = outputs.get("hidden", inputs["x"])
            count = len(feed.tokens)
            rows.append((outputs["new_keys"][:, :, :count], outputs["new_values"][:, :, :count]))
        return rows

    def _check(self, function: PackageFunction, feed: Feed) -> None:
        count = len(feed.tokens)
        if not 1 <= count <= function.tokens:
            raise ValueError(f"{function.name} takes 1 to {function.tokens} tokens, not {count}")
        if function.stateful and feed.slot + function.tokens > self.slots:
            raise ValueError(
                f"{function.name} writes {function.tokens} rows, slot {feed.slot} is too high"
            )

    def _inputs(self, function: PackageFunction, feed: Feed) -> dict[str, Array]:
        """Return the inputs, padded by token 0 at position 0 that attends only to itself."""
        count, size = len(feed.tokens), function.tokens
        tokens, positions = np.zeros(size, np.int64), np.zeros(size, np.int64)
        tokens[:count], positions[:count] = feed.tokens, feed.positions
        visible = np.zeros((size, self.slots + size), np.bool_)
        visible[:count, : self.slots] = feed.cache
        visible[:, self.slots :] = np.eye(size, dtype=bool)
        visible[:count, self.slots : self.slots + count] |= feed.new
        inputs = {name: _columns(table[positions]) for name, table in self._tables.items()}
        inputs["x"] = _columns(self._embedding[tokens])
        inputs["mask_cache"] = _mask(visible[:, : self.slots])
        inputs["mask_new"] = _mask(visible[:, self.slots :])
        if self._window:
            # A committed token's slot is its position, and drafts are never that far away.
            places = np.concatenate([np.arange(self.slots), positions])
            near = places > positions[:, None] - self._window
            inputs["mask_local"] = _mask(visible & near)
        return inputs

    def _write_inputs(self, function: PackageFunction, feed: Feed) -> dict[str, Array]:
        if self.manifest.state_write == "slice":
            return {"slot": np.array([feed.slot], np.int32)}
        scatter = np.zeros((1, 1, self.slots, function.tokens), np.float32)
        for index in range(len(feed.tokens)):
            scatter[0, 0, feed.slot + index, index] = 1.0
        return {"scatter": scatter, "keep": 1 - scatter.max(axis=3, keepdims=True)}

    def _tops(self, outputs: dict[str, Array], count: int) -> list[Top]:
        """Merge the results of the head's products, per token."""
        values, columns, peaks, sums = (
            np.asarray(outputs[f"top_{name}"])[0, :, 0, :count].T
            for name in ("values", "columns", "peaks", "sums")
        )
        order = np.lexsort((columns, -values))
        values = np.take_along_axis(values, order, axis=1).astype(np.float32)
        columns = np.take_along_axis(columns, order, axis=1).astype(np.int64)
        ids = columns if self._head_ids is None else self._head_ids[columns]
        totals = _log_sum(peaks.astype(np.float32), sums.astype(np.float32))
        return [Top(ids[i : i + 1], values[i : i + 1], totals[i : i + 1]) for i in range(count)]


def open_model(folder: Path, units: ComputeUnits) -> ConvertedModel:
    """Open the model in a converted folder.

    Raises:
        ModelError: the folder holds no complete model.
        UsageError: these units do not exist here.
    """
    return ConvertedModel(folder, executor_of(folder, read_manifest(folder), units))


def _columns(rows: Any) -> Array:
    """Convert [tokens, channels] to [1, channels, 1, tokens] float32 for CoreML's Python API."""
    return np.ascontiguousarray(rows.T.astype(np.float32))[None, :, None, :]


def _mask(visible: Visible) -> Array:
    """Convert [tokens, slots] to [1, 1, tokens, slots] float32, to be added to scores."""
    return np.where(visible, np.float32(0), np.float32(MASKED))[None, None]


def _log_sum(peaks: Floats, sums: Floats) -> Floats:
    """Return the log-sum-exp over the head's products, [tokens]."""
    peak = peaks.max(axis=1, keepdims=True)
    totals: Floats = peak[:, 0] + np.log((sums * np.exp(peaks - peak)).sum(axis=1))
    return totals


def causal(count: int) -> Visible:
    """Return [count, count], the tokens of a chain each one attends to."""
    return np.tri(count, dtype=bool)


def chain_feed(tokens: Sequence[int], start: int, slots: int) -> Feed:
    """Return a call for tokens that continue a sequence whose slot numbers are its positions."""
    count = len(tokens)
    cache = np.broadcast_to(np.arange(slots) < start, (count, slots))
    return Feed(tokens, range(start, start + count), start, cache, causal(count))
