"""Prompt lookup: what followed the last time these words were said. Pure; no model.

A guess of this kind is named, not drawn: under the rejection rule all of q is its own.
"""

from collections.abc import Callable, Iterator
from itertools import islice
from typing import NamedTuple

from protocol.messages import Tokens

_LONGEST = 4
_SHORTEST = 2
CONFIDENCE = {2: 0.35, 3: 0.55, 4: 0.75}
"""Assumed rate of acceptance by length of the match; each length has a place of its own where
such rates are learned."""
_RUNNER_UP = 0.3
"""Confidence in the token with which a worse match leaves a better one, as a share of what it would
be alone: that token is right only where the better match's is wrong."""
_MOST_MATCHES = 32
"""Places that are compared: this is done while the target waits."""


class Continuations(NamedTuple):
    """What followed several places, as a tree: what they share is there once."""

    tokens: Tokens
    """Parents before their children; the best place's continuation comes first."""
    parents: list[int]
    """Of each token: 0, nothing is before it, or 1 + the index of the token that is."""
    confidences: list[float]


def find_continuation(
    tokens: Tokens, count: int, possible: Callable[[Tokens], int] = len
) -> tuple[Tokens, float]:
    """What followed the best match, and how sure we are: the longer the match, the surer.

    Args:
        tokens: what was said.
        count: how many tokens are wanted.
        possible: how many of a continuation's tokens may follow; the others are left out, and
            a match that nothing is left of is passed over.
    """
    best = next(_continuations(tokens, count, possible), None)
    return best if best is not None else ([], 0.0)


def find_continuations(
    tokens: Tokens, count: int, most: int, possible: Callable[[Tokens], int] = len
) -> Continuations:
    """What followed the best matches, a branch wherever one goes on differently.

    There are `most` branches at most; the first is that of `find_continuation`. Arguments as there.
    """
    found = Continuations([], [], [])
    rows: dict[tuple[int, int], int] = {}
    branches = 0
    for continuation, confidence in islice(_continuations(tokens, count, possible), _MOST_MATCHES):
        branches += _add(found, rows, continuation, confidence)
        if branches >= most:
            break
    return found


def _add(
    tree: Continuations, rows: dict[tuple[int, int], int], tokens: Tokens, confidence: float
) -> bool:
    """Add what is new of a continuation; whether anything was, and is a branch of its own.

    Args:
        tree: so far.
        rows: (row, token) -> the row of this token behind it; row 0 is before all.
        tokens: the continuation.
        confidence: in it.
    """
    row, is_new, goes_on = 0, False, False
    for token in tokens:
        following = rows.get((row, token))
        if following is None:
            leaves = not is_new and row in tree.parents
            tree.tokens.append(token)
            tree.parents.append(row)
            tree.confidences.append(_RUNNER_UP * confidence if leaves else confidence)
            following = rows[row, token] = len(tree.tokens)
            goes_on = goes_on or leaves or row == 0
            is_new = True
        row = following
    return goes_on


def _continuations(
    tokens: Tokens, count: int, possible: Callable[[Tokens], int]
) -> Iterator[tuple[Tokens, float]]:
    for end, length in _matches(tokens):
        found = tokens[end : end + count]
        kept = possible(found)
        if kept or not found:
            yield found[:kept], CONFIDENCE[length]


def find_successors(tokens: Tokens) -> Iterator[int]:
    """The different tokens that followed earlier occurrences of the ending, best first."""
    found: set[int] = set()
    for end, _ in _matches(tokens):
        if tokens[end] not in found:
            found.add(tokens[end])
            yield tokens[end]


def _matches(tokens: Tokens) -> Iterator[tuple[int, int]]:
    """(index after it, length) of earlier occurrences of the ending: longest, latest first."""
    ends = _ends(tokens)
    matched: set[int] = set()
    for length in range(_LONGEST, _SHORTEST - 1, -1):
        tail = tokens[len(tokens) - length :]
        for end in ends:
            if end not in matched and end >= length and tokens[end - length : end] == tail:
                matched.add(end)
                yield end, length


def _ends(tokens: Tokens) -> list[int]:
    """Indices behind earlier occurrences of the last token, latest first."""
    found: list[int] = []
    last = len(tokens) - 1
    # `index` runs at the speed of C: this is done while the target waits.
    while last > 0:
        try:
            found.append(tokens.index(tokens[last], found[-1] if found else 0, last) + 1)
        except ValueError:
            break
    return found[::-1]
