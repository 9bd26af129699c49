"""Heads that draft blocks (DFlash, DFlash 2, DSpark), ahead of the target's outcome.

While a chain is being verified, its states do not exist: it enters each block as tokens that
are known, and so does a bonus token that is prepared for. One pass over a block for each
prefix of the chain gives the candidates for the bonus; a second one, over a block for each
branch, gives all depths of the tree.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from protocol.decoding.logits_processor import LogitsProcessor
from protocol.decoding.sampling_params import drafter_sampling, is_greedy
from protocol.heads import HeadDescription
from protocol.messages import END_OF_BRANCH, DraftDistribution, FeatureRequest, Sampling, Tokens
from services.drafter.backends.base import (
    DEFAULT_ROUND_OPTIONS,
    MAX_DRAFT_TOKENS,
    BackendIdentity,
    DraftedToken,
    Outcome,
    RoundOptions,
    Rows,
    TreeLayer,
)
from services.drafter.backends.head.dflash import BlockHead, Context
from services.drafter.backends.head.recurrent import WINDOW
from services.drafter.backends.head.states import StateRun
from services.drafter.backends.head.weights import TargetEnds, head_dtype
from services.kv.cache import KVStore
from services.mlx.loader import compute_unit
from services.runtime.sequence_table import SequenceTable, check_rewind
from services.sampling.candidates import Top, best_bonuses, draft_tokens
from services.sampling.device import best_of

_SAMPLED_WIDTH = 64
"""Candidates of a slot when noise decides."""


@dataclass
class _Sequence:
    sampling: Sampling
    """The drafter's."""
    store: KVStore
    """Keys and values of the target's states, from position `first` on."""
    known: Tokens
    """All committed tokens."""
    processor: LogitsProcessor | None
    """After these tokens, if the request shapes logits."""
    states: StateRun = field(default_factory=lambda: StateRun(WINDOW))
    first: int = 0
    """Position of the first state in the store."""


@dataclass
class _Branch:
    """A block in work: what is known of it, and what was drafted last."""

    tokens: Tokens
    """From the block's first position on."""
    processor: LogitsProcessor | None


class BlockBackend:
    """See `base.DraftBackend` and `base.TargetReading`.

    Args:
        head: what is in the head's folder.
        ends: the target's ends.
        module: the head.
        request: what the verifier is asked for.
        prefill_step_size: most states of one pass over a prompt.
        unit: the compute unit, if it is known.
    """

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
        self._head: BlockHead = module
        self._step = prefill_step_size
        self._request = request
        self._folder = ends.model.folder
        self._dtype = head_dtype(ends)
        self._on_gpu = compute_unit() != "cpu"
        self._sent = module.width if request.projection else int(module.fc.weight.shape[1])
        self._sequences: SequenceTable[_Sequence] = SequenceTable()
        self.identity = BackendIdentity(
            backend="head",
            model=head.folder,
            tokenizer_fingerprint=ends.model.vocabulary.fingerprint,
            vocabulary_size=ends.model.vocabulary.size,
            context_length=0,
            compute_unit=unit or compute_unit(),
            max_draft_tokens=MAX_DRAFT_TOKENS,
            features=request,
        )

    # ------------------------------------------------------------ DraftBackend

    def open(self, sequence: int, tokens: Tokens, sampling: Sampling) -> Generator[None]:
        """Compute nothing: the target's states are on their way."""
        processor = None
        if sampling.logits_options is not None:
            processor = LogitsProcessor(
                sampling.logits_options, self._folder, tokens, self._head.head_ids
            )
        self._sequences[sequence] = _Sequence(
            drafter_sampling(sampling), self._new_store(), list(tokens), processor
        )
        yield from ()

    def read(self, sequence: int, first: int, rows: Rows) -> None:
        """Keep them until the next draft; what another drafter had asked for is not ours."""
        known = self._sequences.get(sequence)
        if known is not None and rows.shape[1] == self._sent:
            known.states.add(first, rows)

    def commit(self, sequence: int, base: int, tokens: Tokens) -> None:
        """Note the committed tokens."""
        known = self._sequences[sequence]
        check_rewind(len(known.known), base)
        if base < len(known.known):
            known.states.trim(base)
            known.store.trim(min(known.store.length, max(0, base - known.first)))
        known.known[base:] = tokens
        if known.processor is not None:
            known.processor.rewind(base)
            known.processor.extend(tokens)

    def prepare(
        self,
        sequence: int,
        chain: Tokens,
        fan_out: list[int],
        depth: int,
        options: RoundOptions = DEFAULT_ROUND_OPTIONS,
    ) -> Generator[TreeLayer | None]:
        """Candidates after each prefix of the chain, then a block for each branch."""
        known = self._sequences[sequence]
        yield from self._settle(known)
        at = self._begin(known, len(chain) + 1)
        given = known.known[at:]
        wanted = [(k, n) for k, n in enumerate(fan_out[: len(chain)]) if n > 0]
        wanted = [(k, n) for k, n in wanted if self._room(len(given) + k + 1)]
        if not wanted:
            return
        branches = [self._branch(known, given, chain[: k + 1]) for k, _ in wanted]
        width = max(n for _, n in wanted) + 1
        tops = self._tops(known, branches, self._passes(known, branches, at), width)[0]
        yield None
        roots, grown = [], []
        for (accepted, count), branch, top in zip(wanted, branches, tops, strict=True):
            position = len(known.known) + accepted + 1 + options.shift
            rejected = chain[accepted + 1] if accepted + 1 < len(chain) else None
            best = best_bonuses(top, position, known.sampling)[: count + 1]
            for bonus in [int(token) for token in best if token != rejected][:count]:
                roots.append(Outcome(accepted, bonus))
                grown.append(_extend(branch, bonus))
        for found in self._walk(known, grown, at, depth, options):
            yield _layer(roots, found)

    def draft(
        self, sequence: int, pending: int, count: int, options: RoundOptions = DEFAULT_ROUND_OPTIONS
    ) -> Generator[DraftedToken | None]:
        """One block."""
        known = self._sequences[sequence]
        yield from self._settle(known)
        at = self._begin(known, 1)
        branch = self._branch(known, known.known[at:], [pending])
        for found in self._walk(known, [branch], at, count, options):
            if found[0] is None:
                return
            yield found[0]

    def close(self, sequence: int) -> None:
        """Free the KV."""
        self._sequences.pop(sequence, None)

    # ------------------------------------------------------------ the context

    def _new_store(self) -> KVStore:
        return KVStore([None] * len(self._head.layers), bucketed=False)

    def _settle(self, known: _Sequence) -> Generator[None]:
        """Bring the context up to date with the states that came."""
        states, store = known.states, known.store
        end = known.first + store.length
        if states.end and not known.first <= states.first <= end:
            known.first, end = states.first, states.first
            known.store = store = self._new_store()
        stop = min(states.end, len(known.known))
        while end < stop:
            part = min(stop, end + self._step)
            raw = mx.array(states.at(end, part))[None].astype(self._dtype)
            projected = raw if self._request.projection else self._head.project(raw)
            store.write(store.length, self._head.read(projected, end))
            store.evaluate()
            end = part
            if end < stop:
                yield

    def _begin(self, known: _Sequence, ahead: int) -> int:
        """Where blocks begin: after the last state, unless that leaves no room for a draft."""
        end = known.first + known.store.length
        lag = len(known.known) - end
        return end if lag == 0 or self._room(lag + ahead) else len(known.known)

    def _room(self, known: int) -> int:
        """Tokens that a block with so many known ones drafts."""
        return max(0, self._head.block_size - known + int(self._head.from_first))

    def _context(self, known: _Sequence) -> tuple[Context | None, int]:
        """The last states' keys and values, and the position of the first."""
        stop = known.store.length
        start = max(0, stop - WINDOW)
        if start == stop:
            return None, 0
        found = []
        for cache in known.store.caches:
            if cache.keys is None or cache.values is None:
                return None, 0
            found.append((cache.keys[..., start:stop, :], cache.values[..., start:stop, :]))
        return found, known.first + start

    # ------------------------------------------------------------ blocks

    def _branch(self, known: _Sequence, given: Tokens, chain: Tokens) -> _Branch:
        """A block that begins with committed tokens without states, and tokens of a chain."""
        processor = known.processor
        if processor is not None:
            processor = processor.branch(len(known.known))
            processor.extend(chain)
        return _Branch([*given, *chain], processor)

    def _passes(self, known: _Sequence, branches: Sequence[_Branch], at: int) -> mx.array:
        """[branches, block, width] of the blocks."""
        size, mask = self._head.block_size, self._head.mask_token
        rows = [b.tokens + [mask] * (size - len(b.tokens)) for b in branches]
        context, first = self._context(known)
        return self._head(mx.array(rows), at, context, first)

    def _tops(
        self, known: _Sequence, branches: Sequence[_Branch], hidden: mx.array, width: int
    ) -> tuple[list[Top], list[float] | None]:
        """Candidates after each branch's last token, and the head's own confidences.

        Args:
            known: the sequence.
            branches: perhaps with tokens that were masks when `hidden` was computed.
            hidden: [branches, block, width].
            width: candidates wanted.
        """
        slots = [len(b.tokens) - int(self._head.from_first) for b in branches]
        own = hidden[mx.arange(len(branches)), mx.array(slots)]
        before = mx.array([b.tokens[-1] for b in branches])
        logits = self._head.add_bias(self._head.logits(own), before)[:, : self._head.head_size]
        rows: Any = logits
        shaped = any(b.processor is not None for b in branches)
        if shaped or not self._on_gpu:
            rows = np.array(logits.astype(mx.float32))
        if shaped:
            pairs = zip(branches, rows, strict=True)
            rows = np.stack(
                [r if b.processor is None else b.processor.process(r) for b, r in pairs]
            )
        wide = width if is_greedy(known.sampling) else max(width, _SAMPLED_WIDTH)
        top = best_of(rows, self._head.top_k or wide, self._head.head_ids)
        top = self._head.select(top, own, before)
        found = [top.only(row) for row in range(len(branches))]
        return found, self._head.confidences(own, before)

    def _walk(
        self,
        known: _Sequence,
        branches: list[_Branch],
        at: int,
        depth: int,
        options: RoundOptions,
    ) -> Generator[list[DraftedToken | None]]:
        """Per depth the next token of each branch; None where its block is full."""
        alive = [b for b in branches if self._room(len(b.tokens))]
        if not alive:
            return
        hidden = self._passes(known, alive, at)
        rows = {id(branch): row for row, branch in enumerate(alive)}
        for _ in range(depth):
            alive = [b for b in alive if self._room(len(b.tokens))]
            if not alive:
                return
            own = hidden[mx.array([rows[id(b)] for b in alive])]
            tops, sure = self._tops(known, alive, own, 1)
            drafts: dict[int, DraftedToken] = {}
            for row, (branch, top) in enumerate(zip(alive, tops, strict=True)):
                position = at + len(branch.tokens)
                [drafted] = draft_tokens(top, [position], known.sampling, options)
                drafts[id(branch)] = (
                    drafted if sure is None else drafted._replace(confidence=sure[row])
                )
                branch.tokens.append(drafted.token)
                if branch.processor is not None:
                    branch.processor.extend([drafted.token])
            yield [drafts.get(id(branch)) for branch in branches]


def _extend(branch: _Branch, token: int) -> _Branch:
    """The branch with another token; the first is left as it is."""
    processor = branch.processor
    if processor is not None:
        processor = processor.branch(len(processor))
        processor.extend([token])
    return _Branch([*branch.tokens, token], processor)


def _layer(roots: list[Outcome], found: Sequence[DraftedToken | None]) -> TreeLayer:
    """One depth; where a branch has ended, so much is said."""
    drawn = [DraftDistribution() if one is None else one.distribution for one in found]
    return TreeLayer(
        roots,
        [END_OF_BRANCH if one is None else one.token for one in found],
        [0.0 if one is None else one.confidence for one in found],
        drawn if any(one.tokens for one in drawn) else [],
    )
