"""Heads that draft token by token (EAGLE-3, MTP), ahead of the target's outcome.

A row of such a head joins a token with the target's state at the token before it. While a chain is
being verified these states do not exist: the head's own output for the row before replaces them,
along the chain and the branches after it, until the true states arrive. Row i of the trunk is token
i + 1 of the sequence, since the first token has no state before it; where the states of a prompt's
beginning are unavailable, rows start later.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache, RotatingKVCache
from msgspec.structs import replace

from protocol.decoding.logits_processor import LogitsProcessor
from protocol.decoding.sampler import Ids
from protocol.decoding.sampling_params import drafter_sampling
from protocol.decoding.token_tree import TokenTree
from protocol.decoding.tokens import common_prefix_length
from protocol.heads import HeadDescription
from protocol.messages import FeatureRequest, LogitsOptions, Sampling, Tokens
from services.drafter.backends.base import (
    DEFAULT_ROUND_OPTIONS,
    RoundOptions,
    Rows,
    TreeLayer,
)
from services.drafter.backends.head.states import StateRun
from services.drafter.backends.head.weights import TargetEnds
from services.drafter.backends.mlx import MlxBackend
from services.drafter.backends.mlx_tree import Trunk
from services.kv.cache import KVStore
from services.runtime.sequence_table import check_rewind

WINDOW = 4096
"""Tokens that a head attends to: most were trained on no more."""
_MOST_ALONE = 16
"""Most consecutive rows that are drafted on the head's own output; beyond, it starts anew."""


class RecurrentHead(Protocol):
    """A head of one layer that is fed token by token."""

    width: int
    """Width of its input and output states."""
    head_ids: Ids | None
    """Token id of each column of its logits; None if column i is token i."""
    head_size: int
    """Number of columns."""

    @property
    def normalization(self) -> str:
        """Normalization of the target's states, as in `FeatureRequest`."""
        ...

    def project(self, states: mx.array) -> mx.array:
        """Project [1, tokens, features sent by the target] to [1, tokens, width]."""
        ...

    def __call__(self, tokens: mx.array, states: mx.array, cache: Any) -> tuple[mx.array, mx.array]:
        """Return logits [1, tokens, head] and substitutes for the next states, [1, tokens, width].

        Args:
            tokens: [1, tokens].
            states: [1, tokens, width] at the token before each.
            cache: of its one layer.
        """
        ...


class _CachedHead(nn.Module):
    """A head in the form of a model for tree drafting: states go in and out through a cache.

    The second cache holds the output states of each row as keys, and its input states as values.
    """

    def __init__(self, head: Any) -> None:
        super().__init__()
        self.head = head

    @property
    def layers(self) -> list[Any]:
        """Its only layer."""
        return [self.head.midlayer if "midlayer" in self.head else self.head.layers[0]]

    def make_cache(self) -> list[Any]:
        """Return one cache for the layer, and one for the states."""
        return [RotatingKVCache(max_size=WINDOW), KVCache()]  # type: ignore[no-untyped-call]

    def __call__(
        self, tokens: mx.array, cache: list[Any], states: mx.array | None = None
    ) -> mx.array:
        """Return [1, tokens, head] logits; uses zeros if no states ever arrived."""
        if states is None:
            states = mx.zeros((*tokens.shape, self.head.width), self.head.norm.weight.dtype)
        logits, out = self.head(tokens, states, cache[0])
        cache[1].update_and_fetch(out[:, None], states[:, None])
        result: mx.array = logits
        return result


@dataclass
class _HeadTrunk(Trunk):
    states: StateRun = field(default_factory=lambda: StateRun(WINDOW))
    first: int = -1
    """Position whose state is row 0's; -1 before the first draft."""
    settled: int = 0
    """Rows at the start of the trunk that were computed from the target's states."""
    inputs: mx.array | None = None
    """[1, rows, width] states of the next forward; None to use the outputs of the rows' parents."""
    options: LogitsOptions | None = None


class RecurrentBackend(MlxBackend):
    """Draft backend of heads that draft token by token on their own output.

    Args:
        head: description of the head's folder.
        ends: the target's ends.
        module: the head.
        request: the features requested from the verifier.
        prefill_step_size: most rows of one pass over a prompt.
        unit: the compute unit, if known.
    """

    _feeds_by_depth = True

    def __init__(
        self,
        head: HeadDescription,
        ends: TargetEnds,
        module: Any,
        request: FeatureRequest,
        *,
        prefill_step_size: int,
        unit: str = "",
    ) -> None:
        self._head: RecurrentHead = module
        self._step = prefill_step_size
        self._request = request
        loaded = ends.model._replace(module=_CachedHead(module), context_length=0)
        super().__init__(Path(head.folder), prefill_step_size, unit, loaded=loaded)
        self._folder = ends.model.folder  # grammars need its tokenizer
        self._head_ids, self._head_size = module.head_ids, module.head_size
        self.identity = self.identity._replace(backend="head", features=request)
        self._dtype = module.norm.weight.dtype
        projected = request.projection or request.normalization == "final"
        self._sent = module.width if projected else int(module.fc.weight.shape[1])
        """Numbers per token that the verifier sends."""

    def open(self, sequence: int, tokens: Tokens, sampling: Sampling) -> Generator[None]:
        """Compute nothing: the target's states are on their way."""
        opened = _HeadTrunk(self._new_store(), drafter_sampling(sampling), sequence=list(tokens))
        opened.options = sampling.logits_options
        self._sequences[sequence] = opened
        yield from ()

    def read(self, sequence: int, first: int, rows: Rows) -> None:
        """Keep the states until the next draft; drop those that another drafter requested."""
        trunk = self._sequences.get(sequence)
        if isinstance(trunk, _HeadTrunk) and rows.shape[1] == self._sent:
            trunk.states.add(first, rows)

    def commit(self, sequence: int, base: int, tokens: Tokens) -> None:
        """Record the committed tokens."""
        trunk = self._own(sequence)
        check_rewind(len(trunk.sequence), base)
        if base < len(trunk.sequence):
            trunk.states.trim(base)
            trunk.settled = min(trunk.settled, max(0, base - trunk.first))
        trunk.sequence[base:] = tokens

    def prepare(
        self,
        sequence: int,
        tree: TokenTree,
        fan_out: list[int],
        depth: int,
        options: RoundOptions = DEFAULT_ROUND_OPTIONS,
    ) -> Generator[TreeLayer | None]:
        """Grow branches as `MlxBackend` does."""
        shifted = self._begin(self._own(sequence), options)
        yield from super().prepare(sequence, tree, fan_out, depth, shifted)

    def draft(
        self, sequence: int, pending: int, count: int, options: RoundOptions = DEFAULT_ROUND_OPTIONS
    ) -> Generator[TreeLayer | None]:
        """Draft as `MlxBackend` does."""
        shifted = self._begin(self._own(sequence), options)
        yield from super().draft(sequence, pending, count, shifted)

    def close(self, sequence: int) -> None:
        """Free the KV."""
        self._sequences.pop(sequence, None)

    def _own(self, sequence: int) -> _HeadTrunk:
        trunk = self._sequences[sequence]
        if not isinstance(trunk, _HeadTrunk):
            raise TypeError(f"sequence {sequence} does not belong to this backend")
        return trunk

    # ------------------------------------------------------------ start of the trunk

    def _begin(self, trunk: _HeadTrunk, options: RoundOptions) -> RoundOptions:
        """Choose the trunk's first row; return the options with positions counted from there."""
        last = len(trunk.sequence) - 1
        states = trunk.states
        end = states.end if states.first <= last else 0  # else they are of tokens to come
        useful = last < end + _MOST_ALONE if end else False
        best = states.first if useful else last
        there = self._count_rows(trunk)
        misplaced = useful and not trunk.first <= best <= trunk.first + there
        alone = last - trunk.first - max(there, end - trunk.first)
        if trunk.first < 0 or misplaced or alone > _MOST_ALONE:
            self._restart(trunk, best)
        trunk.committed = last - trunk.first
        return options._replace(shift=options.shift + trunk.first + 1)

    @staticmethod
    def _count_rows(trunk: _HeadTrunk) -> int:
        """Return the number of trunk rows whose tokens are committed."""
        old = min(trunk.committed, len(trunk.tokens), max(0, len(trunk.sequence) - trunk.first - 1))
        return old + common_prefix_length(
            trunk.tokens[old:], trunk.sequence[trunk.first + 1 + old :]
        )

    def _restart(self, trunk: _HeadTrunk, first: int) -> None:
        trunk.store = self._new_store()
        trunk.tokens, trunk.tops, trunk.tree = [], {}, None
        trunk.first, trunk.settled = first, 0
        if trunk.options is not None:
            begins = max(0, trunk.options.answer_from - first - 1)
            shifted = replace(trunk.options, answer_from=begins)
            trunk.processor = LogitsProcessor(shifted, self._folder, [], self._head_ids)

    # ------------------------------------------------------------ the trunk

    def _feed(
        self, trunk: Trunk, base: int, tokens: Tokens, rows: int, width: int = 1
    ) -> Generator[None]:
        """Feed tokens like `MlxBackend`; rows whose states have arrived are recomputed."""
        if not isinstance(trunk, _HeadTrunk):
            raise TypeError("the trunk does not belong to this backend")
        wanted = trunk.sequence[trunk.first + 1 :] + tokens
        start = min(trunk.settled, trunk.committed, len(trunk.tokens))
        keep = start + common_prefix_length(trunk.tokens[start:], wanted[start:])
        keep = self._adopt(trunk, wanted, keep, len(wanted) - rows, width)
        trunk.settled = min(trunk.settled, keep)
        begin = keep
        if trunk.settled < trunk.states.end - trunk.first:
            begin = min(keep, max(trunk.settled, trunk.states.first - trunk.first))
        for position in range(len(wanted) - rows, begin):
            top = trunk.tops.get(position)
            if top is None or top.ids.shape[1] < min(width, self._head_size):
                begin = position
                break
        if begin < len(wanted):
            yield from self._fill(
                trunk, wanted, begin, keep, first_row=len(wanted) - rows, width=width
            )
        del base

    def _fill(
        self,
        trunk: _HeadTrunk,
        wanted: Tokens,
        begin: int,
        keep: int,
        *,
        first_row: int,
        width: int,
    ) -> Generator[None]:
        """Compute the rows from `begin` on; those before `keep` come from other states."""
        states, covered = self._states(trunk, begin, keep), self._count_covered(trunk, begin)
        trunk.cut(begin)
        at = begin
        while at < len(wanted):
            given = begin + states.shape[1] - at
            stop = min(at + max(1, min(given, self._step)), len(wanted))
            if at < first_row < stop:
                stop = first_row
            if given > 0 or at == 0:
                part = states[:, at - begin : stop - begin]
                trunk.inputs = (
                    part if given > 0 else mx.zeros((1, 1, self._head.width), self._dtype)
                )
            self._append(trunk, wanted[at:stop], width if at >= first_row else 0)
            if stop < first_row:
                yield
            at = stop
        trunk.settled = (
            min(covered, len(trunk.tokens)) if covered > begin else min(trunk.settled, begin)
        )

    @staticmethod
    def _count_covered(trunk: _HeadTrunk, begin: int) -> int:
        """Return the end of the states that arrived from `begin` on; `begin` itself if none did."""
        covers = trunk.states.covers(trunk.first + begin)
        return trunk.states.end - trunk.first if covers else begin

    def _states(self, trunk: _HeadTrunk, begin: int, keep: int) -> mx.array:
        """Return [1, rows, width] for all rows from `begin` on that have states.

        They are the target's if they arrived, otherwise those the row was computed from before.
        """
        end = self._count_covered(trunk, begin)
        parts = []
        if begin < end:
            sent = trunk.states.at(trunk.first + begin, trunk.first + end)
            raw = mx.array(sent)[None].astype(self._dtype)
            parts.append(raw if self._request.projection else self._head.project(raw))
        before = trunk.store.caches[1].values
        if end < keep and before is not None:
            parts.append(before[:, 0, end:keep])
        if not parts:
            return mx.zeros((1, 0, self._head.width), self._dtype)
        return mx.concatenate(parts, axis=1)

    # ------------------------------------------------------------ the head

    def _inputs(self, trunk: Trunk) -> Callable[[], mx.array]:
        """Return the states of the rows that are fed."""
        if not isinstance(trunk, _HeadTrunk) or not isinstance(trunk.store, KVStore):
            raise TypeError("the trunk does not belong to this backend")
        given, trunk.inputs = trunk.inputs, None
        if given is not None:
            return lambda: given
        return partial(self._stand_ins, trunk, trunk.store)

    def _stand_ins(self, trunk: _HeadTrunk, store: KVStore) -> mx.array:
        """Return [1, rows, width] for rows without given states.

        They are the target's at the pending token's row, otherwise the output of the row before;
        zeros if there is none.
        """
        positions = store.span.own_positions
        if len(positions) == 1 and trunk.states.covers(trunk.first + int(positions[0])):
            return self._states(trunk, int(positions[0]), 0)[:, :1]
        given = store.caches[1].keys
        if given is None or not store.span.start:
            return mx.zeros((1, len(positions), self._head.width), self._dtype)
        return mx.take(given[:, 0], mx.array(store.span.parent_slots), axis=1)
