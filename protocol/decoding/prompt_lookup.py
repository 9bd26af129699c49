"""Prompt lookup: what followed the last time these words were said. Pure; no model.

A guess of this kind is named, not drawn: under the rejection rule all of q is its own.
"""

from collections.abc import Callable, Iterator

from protocol.messages import Tokens

_LONGEST = 4
_SHORTEST = 2
CONFIDENCE = {2: 0.35, 3: 0.55, 4: 0.75}
"""Assumed rate of acceptance by length of the match; each length has a place of its own where
such rates are learned."""


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
    for end, length in _matches(tokens):
        found = tokens[end : end + count]
        kept = possible(found)
        if kept or not found:
            return found[:kept], CONFIDENCE[length]
    return [], 0.0


def find_successors(tokens: Tokens) -> Iterator[int]:
    """The different tokens that followed earlier occurrences of the ending, best first."""
    return (tokens[end] for end, _ in _matches(tokens))


def _matches(tokens: Tokens) -> Iterator[tuple[int, int]]:
    """(index after it, length) of earlier occurrences of the ending: longest, latest first.

    Of those that the same token follows, the first.
    """
    ends = _ends(tokens)
    followed: set[int] = set()
    for length in range(_LONGEST, _SHORTEST - 1, -1):
        tail = tokens[len(tokens) - length :]
        for end in ends:
            if tokens[end] in followed:
                continue
            if end >= length and tokens[end - length : end] == tail:
                followed.add(tokens[end])
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
