"""Prompt lookup as a drafter: what followed the last time. No model.

Good on text that repeats itself: code edits, quotations, summaries. What a request's bias or
grammar rules out is not proposed; penalties rule nothing out.
"""

from collections.abc import Generator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

from msgspec.structs import replace

from protocol.decoding.logits_processor import LogitsProcessor
from protocol.decoding.prompt_lookup import find_continuation, find_successors
from protocol.messages import END_OF_BRANCH, LogitsOptions, Sampling, Tokens
from services.drafter.backends.base import (
    DEFAULT_ROUND_OPTIONS,
    BackendIdentity,
    DraftedToken,
    Outcome,
    RoundOptions,
    TreeLayer,
)
from services.runtime.sequence_table import SequenceTable, check_rewind

MAX_DRAFT_TOKENS = 64


@dataclass
class _Sequence:
    tokens: Tokens
    """What is committed."""
    processor: LogitsProcessor | None
    """After these tokens, if the request shapes logits."""

    def count_allowed(self, sure: Tokens, draft: Tokens) -> int:
        """How many draft tokens may follow the committed ones and `sure`."""
        return len(draft) if self.processor is None else self.processor.count_allowed(sure, draft)


class NgramBackend:
    """See `base.DraftBackend`.

    Args:
        folder: the target's, for grammars, which need its tokenizer; None: they are not heeded.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._sequences: SequenceTable[_Sequence] = SequenceTable()
        self.identity = BackendIdentity(
            backend="ngram",
            model="",
            tokenizer_fingerprint="",
            vocabulary_size=0,
            context_length=0,
            compute_unit="cpu",
            max_draft_tokens=MAX_DRAFT_TOKENS,
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
        chain: Tokens,
        fan_out: list[int],
        depth: int,
        options: RoundOptions = DEFAULT_ROUND_OPTIONS,
    ) -> Generator[TreeLayer]:
        """One branch per distinct continuation found after each prefix of the chain."""
        del options  # nothing is drawn
        known = self._sequences[sequence]
        outcomes: list[Outcome] = []
        drafts: list[Tokens] = []
        confidences: list[float] = []
        for accepted, wanted in enumerate(fan_out):
            rejected = chain[accepted + 1] if accepted + 1 < len(chain) else None
            sure = chain[: accepted + 1]
            prefix = known.tokens + sure
            likely = (
                t
                for t in find_successors(prefix)
                if t != rejected and known.count_allowed(sure, [t])
            )
            for bonus in islice(likely, max(0, wanted)):
                possible = partial(known.count_allowed, [*sure, bonus])
                draft, confidence = find_continuation([*prefix, bonus], depth, possible)
                if draft:
                    outcomes.append(Outcome(accepted, bonus))
                    drafts.append(draft)
                    confidences.append(confidence)
        for level in range(max(map(len, drafts), default=0)):
            tokens = [draft[level] if level < len(draft) else END_OF_BRANCH for draft in drafts]
            yield TreeLayer(outcomes, tokens, confidences)

    def draft(
        self, sequence: int, pending: int, count: int, options: RoundOptions = DEFAULT_ROUND_OPTIONS
    ) -> Generator[DraftedToken]:
        """The continuation of the latest similar place."""
        del options
        known = self._sequences[sequence]
        possible = partial(known.count_allowed, [pending])
        draft, confidence = find_continuation([*known.tokens, pending], count, possible)
        for token in draft:
            yield DraftedToken(token, confidence)

    def close(self, sequence: int) -> None:
        """Forget the tokens."""
        self._sequences.pop(sequence, None)
