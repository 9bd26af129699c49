"""Prompt lookup as a drafter (`protocol.lookup`): what followed the last time. No model.

Good on text that repeats itself: code edits, quotations, summaries.
"""

from collections.abc import Generator, Iterator

from protocol.errors import ProtocolError
from protocol.lookup import continuation, successors
from protocol.messages import ENDED, Sampling, Tokens
from services.backends.interface import NO_TURN, BackendIdentity, Drafted, Layer, Outcome, Turn

MAX_DRAFT_TOKENS = 64


class NgramBackend:
    """See `interface.DraftBackend`."""

    def __init__(self) -> None:
        self._tokens: dict[int, Tokens] = {}
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
        """Remember the tokens; lookup needs no sampling parameters."""
        del sampling
        self._tokens[sequence] = list(tokens)
        yield

    def commit(self, sequence: int, base: int, tokens: Tokens) -> None:
        """Rewind to `base` and append."""
        known = self._known(sequence)
        if base > len(known):
            raise ProtocolError(f"cannot rewind {len(known)} tokens to {base}")
        known[base:] = tokens

    def prepare(
        self, sequence: int, chain: Tokens, fan_out: list[int], depth: int, turn: Turn = NO_TURN
    ) -> Generator[Layer]:
        """One branch per distinct continuation found after each prefix of the chain."""
        del turn  # nothing is drawn
        known = self._known(sequence)
        outcomes: list[Outcome] = []
        drafts: list[Tokens] = []
        confidences: list[float] = []
        for accepted, wanted in enumerate(fan_out):
            rejected = chain[accepted + 1] if accepted + 1 < len(chain) else None
            prefix = known + chain[: accepted + 1]
            for bonus in _first_distinct(successors(prefix), wanted, rejected):
                draft, confidence = continuation([*prefix, bonus], depth)
                if draft:
                    outcomes.append(Outcome(accepted, bonus))
                    drafts.append(draft)
                    confidences.append(confidence)
        for level in range(max(map(len, drafts), default=0)):
            tokens = [draft[level] if level < len(draft) else ENDED for draft in drafts]
            yield Layer(outcomes, tokens, confidences)

    def draft(
        self, sequence: int, pending: int, count: int, turn: Turn = NO_TURN
    ) -> Generator[Drafted]:
        """The continuation of the latest similar place."""
        del turn
        draft, confidence = continuation([*self._known(sequence), pending], count)
        for token in draft:
            yield Drafted(token, confidence)

    def close(self, sequence: int) -> None:
        """Forget the tokens."""
        self._tokens.pop(sequence, None)

    def _known(self, sequence: int) -> Tokens:
        if sequence not in self._tokens:
            raise ProtocolError(f"sequence {sequence} is not open")
        return self._tokens[sequence]


def _first_distinct(tokens: Iterator[int], count: int, excluded: int | None) -> Tokens:
    found: dict[int, None] = {}
    for token in tokens:
        if len(found) >= count:
            break
        if token != excluded:
            found[token] = None
    return list(found)
