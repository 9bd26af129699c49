"""What a drafter backend is. Read this to write another one.

A backend drafts for sequences that the drafter process names by number. It owns whatever
state it needs (a KV, a list of tokens) and may do as little as it likes: fewer branches,
shorter drafts or none at all cost speed only, never correctness, because the target
verifies every token.

One promise matters: a draft token is a function of the tokens before it, unless it was drawn
at random; then the distribution that it was drawn from comes with it, exactly, and what was drawn
does not decide what is offered (`protocol.decoding.rejection`, `candidates.draft_tokens`).

Life of a sequence: `open` with the committed tokens; then, per round, `commit` brings it up
to date and one of `prepare` or `draft` is asked for; `close` ends it. Methods raise on
failure and stay usable for other sequences.
"""

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy.typing as npt

from protocol.decoding.token_tree import TokenTree
from protocol.messages import DraftDistribution, FeatureRequest, Sampling, Tokens

MAX_DRAFT_TOKENS = 64
"""The deepest tree that any of our own backends grows."""

Rows = npt.NDArray[Any]
"""[tokens, width] of the target's states."""


class Outcome(NamedTuple):
    """What a verification may return: accepted draft tokens, then the bonus token."""

    accepted: int
    bonus: int


class RoundOptions(NamedTuple):
    """What a backend that draws tokens at random needs to know of a round; others ignore it."""

    number: int = 0
    """The round: two rounds draw independently."""
    held_back: int = 0
    """How many of the best tokens Saguaro sampling holds back."""
    shift: int = 0
    """Tokens that a backend with a short context was not given (see `sliding_context`): what to
    add to its positions where the noise of a position is asked for."""
    siblings: int = 0
    """Candidates to name beside the best one, for `TreeDrafting`."""


DEFAULT_ROUND_OPTIONS = RoundOptions()


class DraftedToken(NamedTuple):
    """One draft token, and how sure the backend is of it (see `TreeLayer.confidences`)."""

    token: int
    confidence: float
    distribution: DraftDistribution = DraftDistribution()
    """What the token was drawn from; without tokens, as here, it was not drawn."""


@dataclass(frozen=True)
class TreeLayer:
    """One depth of all branches."""

    outcomes: list[Outcome]
    """The branches, in an order that all layers of one tree share."""
    tokens: list[int]
    """The draft token of each branch at this depth, or `messages.END_OF_BRANCH`."""
    confidences: list[float]
    """How sure the backend is of each of these tokens, 0 to 1; a rough guess will do, since
    the orchestrator learns how often tokens of a given confidence are accepted."""
    distributions: list[DraftDistribution] = field(default_factory=list)
    """What each of these tokens was drawn from; empty if none was drawn."""
    parents: list[int] = field(default_factory=list)
    """Which of the layer before each token follows, at the first layer which outcome; siblings
    in falling order of likelihood. Empty: one token for each, in their order."""


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
    """What it reads of the target; then it is `TargetReading`, too."""
    takes_trees: bool = False
    """Whether it prepares for the outcomes of trees, and grows branches that fork."""


@runtime_checkable
class TargetReading(Protocol):
    """What a backend that reads the target can do besides."""

    def read(self, sequence: int, first: int, rows: Rows) -> None:
        """The target's states at committed tokens from position `first` on, [tokens, width].

        They may come before the tokens do, again, in any order, or never: then the backend
        drafts without. Sequences that are not open are ignored.
        """
        ...


@runtime_checkable
class TreeDrafting(Protocol):
    """What a backend whose identity says `takes_trees` can do besides."""

    def prepare_tree(
        self,
        sequence: int,
        tree: TokenTree,
        fan_out: list[int],
        depth: int,
        options: RoundOptions = DEFAULT_ROUND_OPTIONS,
    ) -> Generator[TreeLayer | None]:
        """As `DraftBackend.prepare`, for the outcomes of verifying a tree.

        An outcome's first number is the row of the last token that stands; no child of that
        row can be its bonus token.
        """
        ...

    def draft_tree(
        self, sequence: int, pending: int, count: int, options: RoundOptions = DEFAULT_ROUND_OPTIONS
    ) -> Generator[TreeLayer | None]:
        """Up to `count` layers of the one branch after the pending token, with siblings.

        The outcome in the first layer is (0, pending).
        """
        ...


class DraftBackend(Protocol):
    """A source of drafts."""

    @property
    def identity(self) -> BackendIdentity:
        """Fixed once the backend is constructed, which is when models are loaded."""
        ...

    def open(self, sequence: int, tokens: Tokens, sampling: Sampling) -> Generator[None]:
        """Start a sequence with these committed tokens (a prefill, say).

        Yields at points where the work may be abandoned; the sequence is open when the
        generator ends.
        """
        ...

    def commit(self, sequence: int, base: int, tokens: Tokens) -> None:
        """Keep the first `base` committed tokens, drop the rest, then append `tokens`."""
        ...

    def prepare(
        self,
        sequence: int,
        chain: Tokens,
        fan_out: list[int],
        depth: int,
        options: RoundOptions = DEFAULT_ROUND_OPTIONS,
    ) -> Generator[TreeLayer | None]:
        """Branches for the outcomes of verifying `chain`, one depth at a time.

        `chain[0]` is the pending token, which follows the committed ones; the target is
        verifying chain[1:] right now. `fan_out[k]` outcomes (k, bonus) are wanted for each
        acceptance length k; for k < len(chain) - 1 the bonus cannot be chain[k + 1], which
        was rejected. The generator may be closed between two layers. None is a pause in which
        other sequences may be worked for.
        """
        ...

    def draft(
        self, sequence: int, pending: int, count: int, options: RoundOptions = DEFAULT_ROUND_OPTIONS
    ) -> Generator[DraftedToken | None]:
        """Up to `count` draft tokens after the pending token, one at a time."""
        ...

    def close(self, sequence: int) -> None:
        """Forget a sequence; unknown ones are ignored."""
        ...
