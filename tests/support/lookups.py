"""One continuation of a prompt lookup."""

from collections.abc import Callable

from protocol.decoding.prompt_lookup import find_continuations
from protocol.messages import Tokens


def find_continuation(
    tokens: Tokens, count: int, possible: Callable[[Tokens], int] = len
) -> tuple[Tokens, float]:
    """Return the continuation of the best match, and its confidence; 0 if there is none."""
    chain = find_continuations(tokens, count, 1, possible)
    return chain.tokens, max(chain.confidences, default=0.0)
