"""Prompt lookup: drafts the continuation of an earlier occurrence of the last tokens. Pure.

Such a draft is deterministic: under the rejection rule its q is one.
"""

from collections.abc import Callable, Iterator
from itertools import islice
from typing import NamedTuple

from protocol.messages import Tokens

LONGEST_LOOKUP = 31
"""Tokens of a continuation: finding them is free, and where text is copied most are right."""
CONFIDENCE = {1: 0.15, 2: 0.35, 3: 0.55, 4: 0.75, 8: 0.85, 16: 0.95}
"""Assumed acceptance rate by length of the match, at least; rates are also learned for each."""
_RUNNER_UP = 0.3
"""Confidence in the token at which a worse match departs from a better one, relative to its own:
that token is right only where the better match's is wrong.
"""
_MOST_MATCHES = 32
"""Matches to compare: this happens while the target waits."""


class Continuations(NamedTuple):
    """Continuations of several matches, as a tree with shared prefixes."""

    tokens: Tokens
    """Parents before their children; the best match's continuation comes first."""
    parents: list[int]
    """Parent of each token: 0 for none, or 1 + its index."""
    confidences: list[float]


def find_continuations(
    tokens: Tokens, count: int, most: int, possible: Callable[[Tokens], int] = len
) -> Continuations:
    """Return the continuations of the best matches, with a branch wherever two differ.

    Args:
        tokens: prompt and answer so far.
        count: number of tokens of a continuation.
        most: most branches; the first is the best match's.
        possible: returns how many of a continuation's tokens are allowed; it is cut there, and
            a match without any is skipped.

    A confidence grows with the length of the match.
    """
    tree = Continuations([], [], [])
    rows: dict[tuple[int, int], int] = {}
    branches = 0
    for continuation, confidence in islice(_continuations(tokens, count, possible), _MOST_MATCHES):
        if most == 1:
            length = len(continuation)
            return Continuations(continuation, [*range(length)], [confidence] * length)
        branches += _add(tree, rows, continuation, confidence)
        if branches >= most:
            break
    return tree


def _add(
    tree: Continuations, rows: dict[tuple[int, int], int], tokens: Tokens, confidence: float
) -> bool:
    """Add the new part of a continuation; return True if it forms a branch.

    Args:
        tree: the tree to extend.
        rows: (row, token) -> the row of this token after it; row 0 precedes all.
        tokens: the continuation.
        confidence: its confidence.
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
        continuation = tokens[end : end + count]
        kept = possible(continuation)
        if kept or not continuation:
            yield continuation[:kept], CONFIDENCE[length]


def _matches(tokens: Tokens) -> list[tuple[int, int]]:
    """Return (index after it, class of length) of earlier occurrences of the ending: longest,
    latest first.
    """
    tails = [(length, tokens[-length:]) for length in sorted(CONFIDENCE)]
    matches: list[tuple[int, int]] = []
    for end in _ends(tokens):
        longest = 0
        for length, tail in tails:
            if end < length or tokens[end - length : end] != tail:
                break
            longest = length
        matches.append((end, longest))
    return sorted(matches, key=lambda match: match[1], reverse=True)


def _ends(tokens: Tokens) -> list[int]:
    """Return the indices after earlier occurrences of the last token, latest first."""
    ends: list[int] = []
    last = len(tokens) - 1
    # `index` runs in C: the target is waiting.
    while last > 0:
        try:
            ends.append(tokens.index(tokens[last], ends[-1] if ends else 0, last) + 1)
        except ValueError:
            break
    return ends[::-1]
