"""The neural backend on a converted model: CoreML on macOS, the reference runtime elsewhere.

It drafts trees like `mlx.py`, over a state of fixed size. A *slot* is a row of it: the trunk, which
is the committed tokens and then the chain under verification, occupies the slots of its positions;
each depth of the tree is written after it, `branches` rows at a time. The slots a branch attends to
are a mask, so forking and rewinding move nothing, and no call writes to a slot of a committed
token: everything after the last one is scratch until it is committed.

The chain of the next round is fed again in one call, even if it was in the tree: its last token has
to be fed anyway, and a call of many tokens costs hardly more than one of one.
"""

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from protocol.decoding.logits_processor import LogitsProcessor
from protocol.decoding.sampling_params import drafter_sampling
from protocol.decoding.token_tree import TokenTree
from protocol.decoding.tokens import common_prefix_length
from protocol.messages import Sampling, Tokens
from services.coreml.model import ConvertedModel, Feed, chain_feed
from services.coreml.runtime.executor import State
from services.drafter.backends.base import (
    DEFAULT_ROUND_OPTIONS,
    MAX_DRAFT_TOKENS,
    BackendIdentity,
    Outcome,
    RoundOptions,
    TreeLayer,
    to_layer,
)
from services.drafter.backends.growth import draft_tokens
from services.runtime.sequence_table import SequenceTable, check_rewind
from services.sampling.candidates import Top, best_bonuses, process_candidates


@dataclass
class _Sequence:
    state: list[State]
    sampling: Sampling
    """The drafter's."""
    committed: Tokens
    fed: Tokens = field(default_factory=list)
    """The trunk: token i's keys and values are in slot i."""
    tops: dict[int, Top] = field(default_factory=dict)
    """Position -> candidates after it, for the trunk's recent tokens."""
    processor: LogitsProcessor | None = None
    """State after `fed`, if the request processes logits."""


class Call(NamedTuple):
    """One call of a function on the trunk."""

    function: str
    tokens: int


class CoremlBackend:
    """Draft backend on a converted model; see `base.DraftBackend`."""

    def __init__(self, model: ConvertedModel) -> None:
        """Draft with a converted model; raises ModelError if it lacks a function."""
        manifest = model.manifest
        self._model = model
        self._branches = manifest.function("tree").tokens
        self._chunk = manifest.function("prefill").tokens
        self._sequences: SequenceTable[_Sequence] = SequenceTable()
        self.identity = BackendIdentity(
            backend="coreml",
            model=str(model.folder),
            tokenizer_fingerprint=manifest.tokenizer_fingerprint,
            vocabulary_size=manifest.vocabulary_size,
            context_length=manifest.slots,
            compute_unit=model.executor.compute_unit,
            max_draft_tokens=MAX_DRAFT_TOKENS,
        )

    # ------------------------------------------------------------ DraftBackend

    def open(self, sequence: int, tokens: Tokens, sampling: Sampling) -> Generator[None]:
        """Prefill into a fresh state, in chunks; may be abandoned between two."""
        state = self._model.new_state()
        opened = _Sequence(state, drafter_sampling(sampling), list(tokens))
        if sampling.logits_options is not None:
            opened.processor = LogitsProcessor(sampling.logits_options, self._model.folder, [])
        fits = len(tokens) <= self._model.slots
        for call in self._calls(0, len(tokens) if fits else 0, rows=0):
            self._feed(opened, call, tokens)
            yield
        self._sequences[sequence] = opened

    def commit(self, sequence: int, base: int, tokens: Tokens) -> None:
        """Record the committed tokens; they are fed with the next chain."""
        known = self._sequences[sequence]
        check_rewind(len(known.committed), base)
        known.committed[base:] = tokens

    def prepare(
        self,
        sequence: int,
        tree: TokenTree,
        fan_out: list[int],
        depth: int,
        options: RoundOptions = DEFAULT_ROUND_OPTIONS,
    ) -> Generator[TreeLayer]:
        """Fork every row of the chain, then grow all branches depth by depth.

        A sequence that has outgrown the state gets no more drafts.
        """
        known, chain = self._sequences[sequence], tree.tokens
        if not self._extend(known, known.committed + chain, rows=len(chain)):
            return
        roots = self._fork(known, chain, fan_out, options)
        tokens = [root.bonus for root in roots]
        grown_from = len(known.committed)
        processors = _branch_processors(
            known.processor, [grown_from + root.accepted + 1 for root in roots]
        )
        for level in range(depth if roots else 0):
            if self._window(known, level, len(roots)) + self._rows(len(roots)) > self._model.slots:
                return
            tops = self._grow(known, grown_from, roots, tokens, level)
            tops = [
                self._process_tops(processor, [token], [top])[0]
                for processor, token, top in zip(processors, tokens, tops, strict=True)
            ]
            layers = []
            for root, top in zip(roots, tops, strict=True):
                position = grown_from + root.accepted + level + 2
                layers += draft_tokens(top, [position], known.sampling, options)
            tokens = [draft.token for draft in layers]
            distributions = [draft.distribution for draft in layers if draft.distribution.tokens]
            yield TreeLayer(roots, tokens, [draft.confidence for draft in layers], distributions)

    def draft(
        self, sequence: int, pending: int, count: int, options: RoundOptions = DEFAULT_ROUND_OPTIONS
    ) -> Generator[TreeLayer]:
        """Draft one continuation on the trunk, one token per call."""
        known = self._sequences[sequence]
        tail = [pending]
        for _ in range(count):
            if not self._extend(known, known.committed + tail, rows=1):
                return
            position = len(known.committed) + len(tail)
            [drafted] = draft_tokens(known.tops[position - 1], [position], known.sampling, options)
            yield to_layer(drafted)
            tail.append(drafted.token)

    def close(self, sequence: int) -> None:
        """Free the state."""
        self._sequences.pop(sequence, None)

    # ------------------------------------------------------------ the trunk

    def _calls(self, start: int, stop: int, rows: int) -> list[Call]:
        """Return the calls that feed positions [start, stop), the last `rows` with candidates."""
        return calls_for(
            start,
            stop,
            rows,
            chunk=self._chunk,
            branches=self._branches,
            slots=self._model.slots,
        )

    def _extend(self, known: _Sequence, wanted: Tokens, rows: int) -> bool:
        """Set the trunk to `wanted`, with candidates after its last `rows` tokens.

        Returns False if it does not fit into the state.
        """
        if len(wanted) > self._model.slots:
            return False
        keep = common_prefix_length(known.fed, wanted)
        for position in range(len(wanted) - rows, keep):
            if position not in known.tops:
                keep = position
                break
        del known.fed[keep:]
        if known.processor is not None:
            known.processor.rewind(keep)
        known.tops = {
            p: top for p, top in known.tops.items() if keep - MAX_DRAFT_TOKENS <= p < keep
        }
        for call in self._calls(keep, len(wanted), rows):
            self._feed(known, call, wanted)
        return True

    def _feed(self, known: _Sequence, call: Call, wanted: Tokens) -> None:
        start = len(known.fed)
        tokens = wanted[start : start + call.tokens]
        tops = self._model.run(
            call.function, chain_feed(tokens, start, self._model.slots), known.state
        )
        known.fed += tokens
        known.tops.update(enumerate(self._process_tops(known.processor, tokens, tops), start))

    def _process_tops(
        self, processor: LogitsProcessor | None, tokens: Tokens, tops: list[Top]
    ) -> list[Top]:
        return process_candidates(processor, tokens, tops, self.identity.vocabulary_size)

    # ------------------------------------------------------------ the tree

    def _fork(
        self, known: _Sequence, chain: Tokens, fan_out: list[int], options: RoundOptions
    ) -> list[Outcome]:
        """Return the outcomes to prepare for: the best bonus tokens at each acceptance length."""
        roots: list[Outcome] = []
        for accepted, wanted in enumerate(fan_out[: len(chain)]):
            position = len(known.committed) + accepted
            best = best_bonuses(known.tops[position], position + 1 + options.shift, known.sampling)
            rejected = chain[accepted + 1] if accepted + 1 < len(chain) else None
            bonuses = [int(token) for token in best[: wanted + 1] if token != rejected]
            roots += [Outcome(accepted, bonus) for bonus in bonuses[:wanted]]
        return roots

    def _rows(self, branches: int) -> int:
        """Return the slots of one depth: a call writes all its rows."""
        return -(-branches // self._branches) * self._branches

    def _window(self, known: _Sequence, level: int, branches: int) -> int:
        """Return the first slot of a depth of the tree."""
        return len(known.fed) + level * self._rows(branches)

    def _grow(
        self, known: _Sequence, base: int, roots: list[Outcome], tokens: Tokens, level: int
    ) -> list[Top]:
        """Feed one token per branch; return the candidates after each."""
        tops: list[Top] = []
        start = self._window(known, level, len(roots))
        for first in range(0, len(roots), self._branches):
            part = slice(first, min(first + self._branches, len(roots)))
            count = part.stop - part.start
            forks = base + np.array([root.accepted for root in roots[part]])
            cache = np.arange(self._model.slots) <= forks[:, None]
            for above in range(level):
                own = self._window(known, above, len(roots)) + first
                cache[np.arange(count), own + np.arange(count)] = True
            feed = Feed(
                tokens=tokens[part],
                positions=(forks + 1 + level).tolist(),
                slot=start + first,
                cache=cache,
                new=np.eye(count, dtype=bool),
            )
            tops += self._model.run("tree", feed, known.state)
        return tops


def _branch_processors(
    trunk: LogitsProcessor | None, lengths: list[int]
) -> list[LogitsProcessor | None]:
    """Return a processor for each branch, after its number of trunk tokens."""
    return [None if trunk is None else trunk.branch(length) for length in lengths]


def calls_for(
    start: int, stop: int, rows: int, *, chunk: int, branches: int, slots: int
) -> list[Call]:
    """Return how positions [start, stop) are fed.

    Tokens whose candidates are not needed go through `prefill`, the last `rows` through `tree` or
    `decode`. Near the end of the state a function of fewer rows takes over, because a call writes
    all its rows.
    """
    calls = []
    while start < stop:
        plain = stop - rows - start
        if plain > branches and start + chunk <= slots:
            call = Call("prefill", min(chunk, plain))
        elif stop - start > 1 and start + branches <= slots:
            call = Call("tree", min(branches, stop - start))
        else:
            call = Call("decode", 1)
        calls.append(call)
        start += call.tokens
    return calls
