"""Common parts of token lists, and of texts."""

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


def overlap(text: str, mark: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of the mark."""
    lengths = range(min(len(text), len(mark) - 1), 0, -1)
    return next((n for n in lengths if mark.startswith(text[-n:])), 0)
