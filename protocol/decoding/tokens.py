"""Helpers for lists of tokens."""

from protocol.messages import Tokens


def common_prefix_length(first: Tokens, *others: Tokens) -> int:
    """Return the length of the common prefix of these lists."""
    length = len(first)
    for other in others:
        length = min(length, len(other))
        if first[:length] != other[:length]:
            pairs = enumerate(zip(first, other, strict=False))
            length = next(index for index, (ours, theirs) in pairs if ours != theirs)
    return length
