"""The neural backend on MLX for drafters that read the target.

The keys and values of committed tokens are not computed from the tokens but projected from the
target's own hidden states (`services.mlx.target_reader`), so a prompt costs next to nothing. The
chain under verification and the branches after it, whose states do not exist yet, go through the
drafter's layers as in `mlx`. Where states never arrive, the drafter reads those tokens by itself,
too: drafts get worse, never wrong.
"""

from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx

from protocol.decoding.logits_processor import LogitsProcessor
from protocol.decoding.sampling_params import drafter_sampling
from protocol.decoding.token_tree import TokenTree
from protocol.decoding.tokens import common_prefix_length
from protocol.errors import ModelError
from protocol.messages import FeatureRequest, Sampling, Tokens
from protocol.settings import DraftWeights
from services.drafter.backends.base import (
    DEFAULT_ROUND_OPTIONS,
    DraftedToken,
    RoundOptions,
    Rows,
    TreeLayer,
)
from services.drafter.backends.mlx import MlxBackend
from services.drafter.backends.mlx_tree import Trunk
from services.mlx.loader import LoadedModel
from services.mlx.target_reader import ReaderDescription, load_reader
from services.runtime.sequence_table import check_rewind


class DrafterReading(NamedTuple):
    """The way a drafter reads."""

    description: ReaderDescription
    reader: Any
    """The drafter's `TargetReader`."""
    loaded: LoadedModel | None = None
    """The drafter, if it is not to be loaded from its folder."""


def read_target(folder: Path, dtype: mx.Dtype) -> DrafterReading:
    """Return how the drafter in `folder` reads; raises ModelError if it does not."""
    reader = load_reader(folder, dtype)
    if reader is None:
        raise ModelError(f"the drafter {str(folder)!r} does not read the target")
    return DrafterReading(*reader)


@dataclass
class _ReadingTrunk(Trunk):
    sequence: Tokens = field(default_factory=list)
    """All committed tokens; the KV may hold fewer."""
    settled: int = 0
    """How many of them have their final keys and values."""
    blocks: list[tuple[int, Rows]] = field(default_factory=list)
    """Positions and states that have arrived and are not in the KV yet."""

    def next_block(self) -> tuple[int, Rows] | None:
        """Return the first states of committed tokens that are not settled, with their position."""
        best: tuple[int, Rows] | None = None
        for first, rows in self.blocks:
            start = max(first, self.settled)
            stop = min(first + len(rows), len(self.sequence))
            if start < stop and (best is None or start < best[0]):
                best = start, rows[start - first : stop - first]
        return best

    def drop_settled(self) -> None:
        """Drop states that are in the KV."""
        self.blocks = [b for b in self.blocks if b[0] + len(b[1]) > self.settled]


class ReadingBackend(MlxBackend):
    """Draft backend that reads the target; see `base.DraftBackend` and `base.TargetReading`."""

    def __init__(
        self,
        folder: Path,
        prefill_step_size: int,
        unit: str = "",
        *,
        weights: DraftWeights = "float",
        reading: DrafterReading | None = None,
    ) -> None:
        loaded = None if reading is None else reading.loaded
        super().__init__(folder, prefill_step_size, unit, loaded=loaded, weights=weights)
        self._step = prefill_step_size
        if reading is None:
            reading = read_target(folder, self._model.model.norm.weight.dtype)
        description, self._reader, _ = reading
        self._dtype = self._reader.norm.weight.dtype
        request = FeatureRequest(layers=description.layers, window=description.window)
        self.identity = self.identity._replace(features=request)

    def open(self, sequence: int, tokens: Tokens, sampling: Sampling) -> Generator[None]:
        """Compute nothing: the target's states are on their way."""
        store = self._new_store()
        opened = _ReadingTrunk(store, drafter_sampling(sampling), sequence=list(tokens))
        opened.committed = len(tokens)
        if sampling.logits_options is not None:
            opened.processor = LogitsProcessor(
                sampling.logits_options, self._folder, [], self._head_ids
            )
        self._sequences[sequence] = opened
        yield from ()

    def read(self, sequence: int, first: int, rows: Rows) -> None:
        """Keep the states until the KV is updated."""
        trunk = self._sequences.get(sequence)
        if isinstance(trunk, _ReadingTrunk):
            trunk.blocks.append((first, rows))

    def commit(self, sequence: int, base: int, tokens: Tokens) -> None:
        """Record the committed tokens."""
        trunk = self._reading(sequence)
        check_rewind(trunk.committed, base)
        trunk.sequence[base:] = tokens
        trunk.committed = len(trunk.sequence)
        trunk.settled = min(trunk.settled, base)

    def prepare_tree(
        self,
        sequence: int,
        tree: TokenTree,
        fan_out: list[int],
        depth: int,
        options: RoundOptions = DEFAULT_ROUND_OPTIONS,
    ) -> Generator[TreeLayer | None]:
        """Prepare for a tree like `MlxBackend`, on an updated KV."""
        yield from self._settle(self._reading(sequence))
        yield from super().prepare_tree(sequence, tree, fan_out, depth, options)

    def draft(
        self, sequence: int, pending: int, count: int, options: RoundOptions = DEFAULT_ROUND_OPTIONS
    ) -> Generator[DraftedToken | None]:
        """Draft like `MlxBackend`, on an updated KV."""
        yield from self._settle(self._reading(sequence))
        yield from super().draft(sequence, pending, count, options)

    def draft_tree(
        self, sequence: int, pending: int, count: int, options: RoundOptions = DEFAULT_ROUND_OPTIONS
    ) -> Generator[TreeLayer | None]:
        """Draft a tree like `MlxBackend`, on an updated KV."""
        yield from self._settle(self._reading(sequence))
        yield from super().draft_tree(sequence, pending, count, options)

    def close(self, sequence: int) -> None:
        """Free the KV."""
        self._sequences.pop(sequence, None)

    def _reading(self, sequence: int) -> _ReadingTrunk:
        trunk = self._sequences[sequence]
        if not isinstance(trunk, _ReadingTrunk):
            raise TypeError(f"sequence {sequence} does not belong to this backend")
        return trunk

    def _make_rows(self, states: mx.array, first: int) -> list[tuple[mx.array, mx.array]]:
        """Return the KV rows of tokens from position `first` on, made from their states."""
        rows: list[tuple[mx.array, mx.array]] = self._reader.rows(self._model, states, first)
        return rows

    def _settle(self, trunk: _ReadingTrunk) -> Generator[None]:
        """Make the trunk start with all committed tokens, from the target's states if possible."""
        while trunk.settled < len(trunk.sequence):
            block = trunk.next_block()
            stop = len(trunk.sequence) if block is None else block[0]
            yield from self._read_alone(trunk, trunk.sequence[:stop])
            if block is None:
                break
            self._write(trunk, *block)
        trunk.drop_settled()

    def _read_alone(self, trunk: _ReadingTrunk, tokens: Tokens) -> Generator[None]:
        """Make the trunk start with these tokens; the drafter computes missing ones."""
        start = common_prefix_length(trunk.tokens, tokens)
        while start < len(tokens):
            yield from self._feed(trunk, start, tokens[start : start + self._step], rows=0)
            start += self._step

    def _write(self, trunk: _ReadingTrunk, first: int, rows: Rows) -> None:
        """Write keys and values made from these states into the trunk's slots from `first` on."""
        states = mx.array(rows)[None].astype(self._dtype)
        stop = first + len(rows)
        if trunk.tree is not None:
            trunk.tree.lost = max(trunk.tree.lost, stop)
        trunk.cut(first)
        trunk.store.write(first, self._make_rows(states, first))
        trunk.tokens += trunk.sequence[first:stop]
        if trunk.processor is not None:
            trunk.processor.extend(trunk.sequence[first:stop])
        trunk.settled = stop
