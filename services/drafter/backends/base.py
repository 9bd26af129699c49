"""The interface of a drafter backend. Read this to write another one.

A backend drafts for sequences that the drafter process identifies by number. It owns all the state
it needs (a KV, a list of tokens) and may do less than requested: fewer branches, shorter drafts or
none cost only speed, never correctness, because the target verifies every token.

One guarantee is required: a draft token is a function of the tokens before it, unless it was drawn
at random; then its exact distribution comes with it, and the drawn token does not influence what is
offered (`protocol.decoding.rejection`, `candidates.draft_tokens`).

Lifecycle of a sequence: `open` with the committed tokens; then, per round, `commit` updates it and
one of `prepare` or `draft` is called; `close` ends it. Methods raise on failure and stay usable for
other sequences.
"""

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy.typing as npt

from protocol.decoding.token_tree import TokenTree
from protocol.messages import DraftDistribution, FeatureRequest, Sampling, Tokens

MAX_DRAFT_TOKENS = 64
"""Depth of the deepest tree that our own backends grow."""

Rows = npt.NDArray[Any]
"""[tokens, width] of the target's states."""


class Outcome(NamedTuple):
    """A possible result of a verification: number of accepted draft tokens, and bonus token."""

    accepted: int
    bonus: int


class RoundOptions(NamedTuple):
    """Options of a round for backends that draw tokens at random; others ignore them."""

    number: int = 0
    """Number of the round: two rounds draw independently."""
    held_back: int = 0
    """Number of top tokens that Saguaro sampling holds back."""
    shift: int = 0
    """Tokens omitted for a backend with a short context (see `sliding_context`), to be added to
    its positions when looking up the noise of a position.
    """
    siblings: int = 0
    """Candidates besides the best one; only for a backend whose identity says `takes_trees`."""


DEFAULT_ROUND_OPTIONS = RoundOptions()


class DraftedToken(NamedTuple):
    """One draft token, and the backend's confidence (see `TreeLayer.confidences`)."""

    token: int
    confidence: float
    distribution: DraftDistribution = DraftDistribution()
    """The distribution it was drawn from; without tokens, as here, it was not drawn."""


@dataclass(frozen=True)
class TreeLayer:
    """One depth of all branches."""

    outcomes: list[Outcome]
    """The branches, in the same order in all layers of a tree; ignored of a `draft`."""
    tokens: list[int]
    """The draft token of each branch at this depth, or `messages.END_OF_BRANCH`."""
    confidences: list[float]
    """Confidence of each of these tokens, 0 to 1; a rough estimate suffices, since the
    orchestrator learns how often tokens of a given confidence are accepted.
    """
    distributions: list[DraftDistribution] = field(default_factory=list)
    """The distribution each of these tokens was drawn from; empty if none was drawn."""
    parents: list[int] = field(default_factory=list)
    """Index in the layer before that each token follows, in the first layer an index of
    `outcomes`; siblings in descending order of likelihood. Empty: one token for each, in order.
    """


def to_layer(draft: DraftedToken) -> TreeLayer:
    """Return the layer of a draft without branches."""
    drawn = [draft.distribution] if draft.distribution.tokens else []
    return TreeLayer([], [draft.token], [draft.confidence], drawn)


class BackendIdentity(NamedTuple):
    """A backend's part of the handshake; see `messages.Hello`."""

    backend: str
    model: str
    tokenizer_fingerprint: str
    vocabulary_size: int
    context_length: int
    compute_unit: str
    max_draft_tokens: int
    features: FeatureRequest | None = None
    """Features it reads from the target; if set, it also implements `TargetReading`."""
    takes_trees: bool = False
    """True if it prepares for the outcomes of trees, and grows branching trees."""


@runtime_checkable
class TargetReading(Protocol):
    """Additional methods of a backend that reads the target."""

    def read(self, sequence: int, first: int, rows: Rows) -> None:
        """Read the target's states at committed tokens from position `first` on, [tokens, width].

        They may arrive before the tokens, repeatedly, in any order, or never: then the backend
        drafts without them. Sequences that are not open are ignored.
        """
        ...


class DraftBackend(Protocol):
    """A source of drafts."""

    @property
    def identity(self) -> BackendIdentity:
        """The backend's identity, fixed once its models are loaded in the constructor."""
        ...

    def open(self, sequence: int, tokens: Tokens, sampling: Sampling) -> Generator[None]:
        """Start a sequence with these committed tokens (a prefill, say).

        Yields at points where the work may be abandoned; the sequence is open when the generator
        ends.
        """
        ...

    def commit(self, sequence: int, base: int, tokens: Tokens) -> None:
        """Keep the first `base` committed tokens, drop the rest, then append `tokens`."""
        ...

    def prepare(
        self,
        sequence: int,
        tree: TokenTree,
        fan_out: list[int],
        depth: int,
        options: RoundOptions = DEFAULT_ROUND_OPTIONS,
    ) -> Generator[TreeLayer | None]:
        """Yield branches for the outcomes of verifying a tree, one depth at a time.

        It is a chain unless the identity says `takes_trees`. Its first token is the pending one,
        which follows the committed ones; the target is verifying the others right now.
        `fan_out[k]` outcomes (k, bonus) are requested for each last accepted row k, of a chain the
        number of accepted draft tokens; the bonus cannot be a child of row k, which was rejected.
        The generator may be closed between two layers. None is a pause in which other sequences
        may be served.
        """
        ...

    def draft(
        self, sequence: int, pending: int, count: int, options: RoundOptions = DEFAULT_ROUND_OPTIONS
    ) -> Generator[TreeLayer | None]:
        """Yield up to `count` layers of the one branch after the pending token."""
        ...

    def close(self, sequence: int) -> None:
        """Drop a sequence; unknown ones are ignored."""
        ...
