"""Prompt lookup as a drafter without a model: what followed the last time.

Good on text that repeats itself: code edits, quotations, summaries. What a request's bias or
grammar rules out is not proposed; penalties rule nothing out.
"""

from collections.abc import Generator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from protocol.decoding.logits_processor import LogitsProcessor
from protocol.decoding.prompt_lookup import Continuations, find_continuations
from protocol.decoding.token_tree import TokenTree
from protocol.messages import END_OF_BRANCH, LogitsOptions, Sampling, Tokens
from services.drafter.backends.base import (
    DEFAULT_ROUND_OPTIONS,
    MAX_DRAFT_TOKENS,
    BackendIdentity,
    Outcome,
    RoundOptions,
    TreeLayer,
)
from services.runtime.sequence_table import SequenceTable, check_rewind
from tests.support.lookups import find_continuation


@dataclass
class _Sequence:
    tokens: Tokens
    """What is committed."""
    processor: LogitsProcessor | None
    """After these tokens, if the request shapes logits."""

    def count_allowed(self, sure: Tokens, draft: Tokens) -> int:
        """How many draft tokens may follow the committed ones and `sure`."""
        return len(draft) if self.processor is None else self.processor.count_allowed(sure, draft)


class LookupBackend:
    """See `base.DraftBackend`.

    Args:
        folder: the target's, for grammars, which need its tokenizer; None: they are not heeded.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._sequences: SequenceTable[_Sequence] = SequenceTable()
        self.identity = BackendIdentity(
            backend="lookup",
            model="",
            tokenizer_fingerprint="",
            vocabulary_size=0,
            context_length=0,
            compute_unit="cpu",
            max_draft_tokens=MAX_DRAFT_TOKENS,
            takes_trees=True,
        )

    def open(self, sequence: int, tokens: Tokens, sampling: Sampling) -> Generator[None]:
        """Remember the tokens; of the sampling, lookup heeds the shape."""
        processor = (
            None
            if sampling.logits_options is None
            else self._processor(sampling.logits_options, tokens)
        )
        self._sequences[sequence] = _Sequence(list(tokens), processor)
        yield

    def _processor(self, shape: LogitsOptions, tokens: Tokens) -> LogitsProcessor:
        if self._folder is None:
            return LogitsProcessor(replace(shape, grammar=""), Path(), tokens)
        return LogitsProcessor(shape, self._folder, tokens)

    def commit(self, sequence: int, base: int, tokens: Tokens) -> None:
        """Rewind to `base` and append."""
        known = self._sequences[sequence]
        check_rewind(len(known.tokens), base)
        known.tokens[base:] = tokens
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
    ) -> Generator[TreeLayer]:
        """What is found behind each row and each distinct successor of it.

        Siblings are what followed other places: a branch forks where these differ.
        """
        known = self._sequences[sequence]
        outcomes: list[Outcome] = []
        drafts: list[Continuations] = []
        for row, wanted in enumerate(fan_out):
            sure = tree.tokens_to(row)
            prefix = known.tokens + sure
            likely = (
                t
                for t in find_continuations(prefix, 1, 99).tokens
                if t not in tree.children[row] and known.count_allowed(sure, [t])
            )
            for bonus in islice(likely, max(0, wanted)):
                possible = partial(known.count_allowed, [*sure, bonus])
                most = 1 + options.siblings
                found = find_continuations([*prefix, bonus], depth, most, possible)
                if found.tokens:
                    outcomes.append(Outcome(row, bonus))
                    drafts.append(found)
        yield from _layers(outcomes, drafts, forks=options.siblings > 0)

    def draft(
        self, sequence: int, pending: int, count: int, options: RoundOptions = DEFAULT_ROUND_OPTIONS
    ) -> Generator[TreeLayer]:
        """What followed the latest similar place; with siblings, several such places."""
        known = self._sequences[sequence]
        tokens, possible = [*known.tokens, pending], partial(known.count_allowed, [pending])
        if options.siblings:
            found = find_continuations(tokens, count, 1 + options.siblings, possible)
            if found.tokens:
                yield from _layers([Outcome(0, pending)], [found], forks=True)
            return
        draft, confidence = find_continuation(tokens, count, possible)
        for token in draft:
            yield TreeLayer([], [token], [confidence])

    def close(self, sequence: int) -> None:
        """Forget the tokens."""
        self._sequences.pop(sequence, None)


class _Node(NamedTuple):
    """A token that was found, at its place in the tree of one outcome."""

    outcome: int
    row: int
    parent: int
    """Its parent's row; 0: it follows the bonus token."""
    token: int
    confidence: float


def _layers(
    outcomes: list[Outcome], drafts: list[Continuations], *, forks: bool
) -> Generator[TreeLayer]:
    """The drafts of each outcome, depth by depth.

    Without `forks` each outcome has one, and layers say where it has ended.
    """
    if not forks:
        for level in range(max((len(draft.tokens) for draft in drafts), default=0)):
            ended = [level >= len(draft.tokens) for draft in drafts]
            pairs = list(zip(ended, drafts, strict=True))
            tokens = [END_OF_BRANCH if end else draft.tokens[level] for end, draft in pairs]
            yield TreeLayer(outcomes, tokens, [draft.confidences[0] for draft in drafts])
        return
    nodes = [
        _Node(outcome, row, *rest)
        for outcome, draft in enumerate(drafts)
        for row, rest in enumerate(
            zip(draft.parents, draft.tokens, draft.confidences, strict=True), 1
        )
    ]
    places = {(outcome, 0): outcome for outcome in range(len(outcomes))}
    while level_nodes := [node for node in nodes if (node.outcome, node.parent) in places]:
        yield TreeLayer(
            outcomes,
            [node.token for node in level_nodes],
            [node.confidence for node in level_nodes],
            parents=[places[node.outcome, node.parent] for node in level_nodes],
        )
        places = {(node.outcome, node.row): at for at, node in enumerate(level_nodes)}
