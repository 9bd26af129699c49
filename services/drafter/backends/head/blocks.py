"""Heads that draft blocks (DFlash, DFlash 2, DSpark), ahead of the target's outcome.

While a chain or a tree is being verified, its states do not exist: the path to a row enters a block
as known tokens, and so does a bonus token that is prepared for. One pass over a block for each row
gives the candidates for the bonus; a second one, over a block for each branch, gives all depths: a
branch that forks continues in the slots of its own block.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from protocol.decoding.logits_processor import LogitsProcessor
from protocol.decoding.sampling_params import drafter_sampling, is_greedy, uses_rejection
from protocol.decoding.token_tree import TokenTree
from protocol.heads import HeadDescription
from protocol.messages import FeatureRequest, Sampling, Tokens
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
from services.drafter.backends.growth import Tip, begin_tips, grow_layer, name_candidates
from services.drafter.backends.head.branches import Branch, Growth, extend, follow, pad_ended, rate
from services.drafter.backends.head.dflash import BlockHead, Context
from services.drafter.backends.head.recurrent import WINDOW
from services.drafter.backends.head.states import StateRun
from services.drafter.backends.head.weights import TargetEnds, head_dtype
from services.drafter.backends.mlx_tree import Bud
from services.kernels.register import kernels
from services.kv.cache import KVStore
from services.runtime.sequence_table import SequenceTable, check_rewind
from services.sampling.candidates import Top, rank_bonuses
from services.sampling.device import best_of

_SAMPLED_WIDTH = 64
"""Candidates of a slot when sampling with noise."""


@dataclass
class _Sequence:
    sampling: Sampling
    """The drafter's."""
    store: KVStore
    """Keys and values of the target's states, from position `first` on."""
    known: Tokens
    """All committed tokens."""
    processor: LogitsProcessor | None
    """State after these tokens, if the request processes logits."""
    states: StateRun = field(default_factory=lambda: StateRun(WINDOW))
    first: int = 0
    """Position of the first state in the store."""


class _Slots:
    """The slots of some blocks, and their logits.

    An output head costs what reading it costs, for few rows as for one. So the logits of later
    slots are computed along with the requested ones.

    Args:
        head: computed them.
        hidden: [blocks, block, width].
        depth: most slots of each block that will be read, one after the other.
    """

    def __init__(self, head: BlockHead, hidden: mx.array, depth: int) -> None:
        self._head, self._hidden = head, hidden
        self._ahead = max(1, min(depth, kernels().most_shared_rows // hidden.shape[0]))
        self._rows: dict[tuple[int, int], int] = {}
        self._logits = hidden

    def read(self, places: list[tuple[int, int]]) -> tuple[mx.array, mx.array]:
        """Return [places, head] logits and [places, width] of these slots: (block, slot)."""
        if not all(place in self._rows for place in places):
            steps, size = range(self._ahead), self._hidden.shape[1]
            every = [(b, s + n) for b, s in dict.fromkeys(places) for n in steps if s + n < size]
            self._logits = self._head.logits(self._take(every))
            self._rows = {place: row for row, place in enumerate(every)}
        rows = mx.array([self._rows[place] for place in places])
        return self._logits[rows], self._take(places)

    def _take(self, places: list[tuple[int, int]]) -> mx.array:
        blocks, slots = zip(*places, strict=True)
        return self._hidden[mx.array(blocks), mx.array(slots)]


class BlockBackend:
    """Draft backend of heads that draft in blocks.

    Args:
        head: description of the head's folder.
        ends: the target's ends.
        module: the head.
        request: the features requested from the verifier.
        prefill_step_size: most states of one pass over a prompt.
        unit: the compute unit, if known.
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
        self._on_gpu = kernels().on_gpu
        self._sent = module.width if request.projection else int(module.fc.weight.shape[1])
        self._sequences: SequenceTable[_Sequence] = SequenceTable()
        self.identity = BackendIdentity(
            backend="head",
            model=head.folder,
            tokenizer_fingerprint=ends.model.vocabulary.fingerprint,
            vocabulary_size=ends.model.vocabulary.size,
            context_length=0,
            compute_unit=unit or kernels().device,
            max_draft_tokens=MAX_DRAFT_TOKENS,
            features=request,
            takes_trees=True,
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
        """Keep the states until the next draft; drop those that another drafter requested."""
        known = self._sequences.get(sequence)
        if known is not None and rows.shape[1] == self._sent:
            known.states.add(first, rows)

    def commit(self, sequence: int, base: int, tokens: Tokens) -> None:
        """Record the committed tokens."""
        known = self._sequences[sequence]
        check_rewind(len(known.known), base)
        if base < len(known.known):
            known.states.trim(base)
            known.store.trim(min(known.store.length, max(0, base - known.first)))
            known.first = min(known.first, base)
        known.known[base:] = tokens
        if known.processor is not None:
            known.processor.rewind(base)
            known.processor.extend(tokens)

    def prepare(
        self,
        sequence: int,
        tree: TokenTree,
        fan_out: list[int],
        depth: int,
        options: RoundOptions = DEFAULT_ROUND_OPTIONS,
    ) -> Generator[TreeLayer | None]:
        """Yield candidates after each row of the tree, then a block for each branch."""
        known = self._sequences[sequence]
        yield from self._settle(known)
        at = self._begin(known, max(tree.depths) + 2)
        given = known.known[at:]
        wanted = {row: n for row, n in enumerate(fan_out[: len(tree)]) if n > 0}
        rows = [row for row in wanted if self._room(len(given) + tree.depths[row] + 1)]
        if not rows:
            return
        branches = [self._branch(known, given, tree.tokens_to(row)) for row in rows]
        width = max(wanted[row] + len(tree.children[row]) for row in rows)
        found = self._tops(known, branches, self._passes(known, branches, at, 1), width)[0]
        yield None
        roots: list[Outcome] = []
        grown: list[Branch] = []
        for row, branch, top in zip(rows, branches, found, strict=True):
            position = len(known.known) + tree.depths[row] + 1 + options.shift
            best = rank_bonuses(top, position, known.sampling)
            rejected = tree.children[row]
            few = best.ids[0, : wanted[row] + len(rejected)].tolist()
            bonuses = [token for token in few if token not in rejected][: wanted[row]]
            roots += [Outcome(row, bonus) for bonus in bonuses]
            grown += [extend(branch, bonus) for bonus in bonuses]
        tips = begin_tips(roots, [Bud(token, -1, -1) for token in tree.tokens])
        growth = list(zip(tips, grown, strict=True))
        yield from self._grow(known, roots, growth, at=at, depth=depth, options=options)

    def draft(
        self, sequence: int, pending: int, count: int, options: RoundOptions = DEFAULT_ROUND_OPTIONS
    ) -> Generator[TreeLayer | None]:
        """Draft one block, in which paths may branch."""
        known = self._sequences[sequence]
        yield from self._settle(known)
        at = self._begin(known, 1)
        branch = self._branch(known, known.known[at:], [pending])
        tip = Tip(pending, -1, -1, 0)
        roots, growth = [Outcome(0, pending)], [(tip, branch)]
        yield from self._grow(known, roots, growth, at=at, depth=count, options=options)

    def close(self, sequence: int) -> None:
        """Free the KV."""
        self._sequences.pop(sequence, None)

    # ------------------------------------------------------------ the context

    def _new_store(self) -> KVStore:
        return KVStore([None] * len(self._head.layers), bucketed=False)

    def _settle(self, known: _Sequence) -> Generator[None]:
        """Update the context with the states that have arrived."""
        states, store = known.states, known.store
        end = known.first + store.length
        ahead = states.first > len(known.known)  # of tokens to come, after a gap
        if states.end and not ahead and not known.first <= states.first <= end:
            known.first, end = states.first, states.first
            known.store = store = self._new_store()
        stop = min(states.end, len(known.known))
        while end < stop and states.covers(end):
            part = min(stop, end + self._step)
            raw = mx.array(states.at(end, part))[None].astype(self._dtype)
            projected = raw if self._request.projection else self._head.project(raw)
            store.write(store.length, self._head.read(projected, end))
            store.evaluate()
            end = part
            if end < stop:
                yield

    def _begin(self, known: _Sequence, ahead: int) -> int:
        """Return the first position of blocks: after the last state, if that leaves room."""
        end = known.first + known.store.length
        lag = len(known.known) - end
        return end if lag == 0 or self._room(lag + ahead) else len(known.known)

    def _room(self, known: int) -> int:
        """Return how many tokens a block with `known` known ones drafts."""
        return max(0, self._head.block_size - known + int(self._head.from_first))

    def _context(self, known: _Sequence) -> tuple[Context | None, int]:
        """Return the last states' keys and values, and the position of the first."""
        stop = known.store.length
        start = max(0, stop - WINDOW)
        if start == stop:
            return None, 0
        context = []
        for cache in known.store.caches:
            if cache.keys is None or cache.values is None:
                return None, 0
            context.append((cache.keys[..., start:stop, :], cache.values[..., start:stop, :]))
        return context, known.first + start

    # ------------------------------------------------------------ blocks

    def _branch(self, known: _Sequence, given: Tokens, chain: Tokens) -> Branch:
        """Return a block that starts with committed tokens without states, then a chain."""
        processor = known.processor
        if processor is not None:
            processor = processor.branch(len(known.known))
            processor.extend(chain)
        return Branch([*given, *chain], processor)

    def _passes(self, known: _Sequence, branches: Sequence[Branch], at: int, depth: int) -> _Slots:
        """Run a block for each branch, of which up to `depth` slots will be read."""
        size, mask = self._head.block_size, self._head.mask_token
        for block, branch in enumerate(branches):
            branch.block = block
        rows = [b.tokens + [mask] * (size - len(b.tokens)) for b in branches]
        context, first = self._context(known)
        return _Slots(self._head, self._head(mx.array(rows), at, context, first), depth)

    def _tops(
        self, known: _Sequence, branches: Sequence[Branch], slots: _Slots, width: int
    ) -> tuple[list[Top], list[float] | None]:
        """Return candidates after each branch's last token, and the head's own confidences.

        Args:
            known: the sequence.
            branches: possibly with tokens that were masks when `slots` were computed.
            slots: of their blocks.
            width: number of candidates.
        """
        logits, own = slots.read(
            [(b.block, len(b.tokens) - int(self._head.from_first)) for b in branches]
        )
        before = mx.array([b.tokens[-1] for b in branches])
        logits = self._head.add_bias(logits, before)[:, : self._head.head_size]
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

    def _grow(
        self,
        known: _Sequence,
        roots: list[Outcome],
        growth: Growth,
        *,
        at: int,
        depth: int,
        options: RoundOptions,
    ) -> Generator[TreeLayer]:
        """Yield the successors of these bonus tokens by depth, until their blocks are full."""
        if uses_rejection(known.sampling):
            options = options._replace(siblings=0)  # drawn tokens have no siblings
        places = [i for i, (_, branch) in enumerate(growth) if self._room(len(branch.tokens))]
        growth = [growth[place] for place in places]
        if not growth:
            return
        slots = self._passes(known, [branch for _, branch in growth], at, depth)
        for _ in range(depth):
            growth = [one for one in growth if self._room(len(one[1].tokens))]
            if not growth:
                return
            branches = [branch for _, branch in growth]
            named = self._name(known, branches, slots, at, options)
            layer, tips = grow_layer(roots, [tip for tip, _ in growth], named, 0, options)
            if not options.siblings:
                layer = pad_ended(layer, [places[branch.block] for branch in branches])
            growth = list(follow(tips, branches))
            yield layer

    def _name(
        self,
        known: _Sequence,
        branches: list[Branch],
        slots: _Slots,
        at: int,
        options: RoundOptions,
    ) -> list[list[DraftedToken]]:
        """Return the tokens that may follow each branch, best first."""
        tops, sure = self._tops(known, branches, slots, 1 + options.siblings)
        found = []
        for row, (branch, top) in enumerate(zip(branches, tops, strict=True)):
            position = at + len(branch.tokens)
            [named] = name_candidates(top, [position], known.sampling, options)
            found.append(named if sure is None else rate(named, sure[row]))
        return found
