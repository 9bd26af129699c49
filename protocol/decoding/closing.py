"""Finds a short valid end for a grammar-bound answer, so that a length limit cuts no JSON.

The end need not be the shortest: each step takes the token that closes most, which ends strings,
arrays and objects and writes the shortest values that are required.
"""

import numpy as np

from protocol.decoding.grammar import AllowedMask, Grammar
from protocol.errors import ProtocolError
from protocol.messages import Tokens

_CLOSING = tuple('}],:0"tfn123456789-[{')
"""Characters between values, in order of preference: those that close most come first."""
_IN_STRING = ("z", "}")
"""Characters that are allowed together only within a string."""


def find_end(grammar: Grammar, most: int) -> Tokens | None:
    """Return tokens that end the answer, its stop token included.

    Args:
        grammar: the grammar after the answer so far; not advanced.
        most: limit on their number.

    Returns:
        The tokens, or None if no end of that length was found.
    """
    probe = grammar.copy()
    way: Tokens = []
    try:
        while len(way) < most:
            if probe.is_accepting:
                return [*way, grammar.stop_id]
            way.append(_choose(probe.characters, probe.compute_mask()))
            if not probe.advance(way[-1]):
                return None
    except ProtocolError:
        return None  # too expensive: the answer continues without it
    return None


def _choose(tokens: dict[str, int], allowed: AllowedMask) -> int:
    """Return the allowed token that closes most; `tokens` are those of single characters."""
    in_string = all(c in tokens and allowed[tokens[c]] for c in _IN_STRING)
    for character in '"' if in_string else _CLOSING:
        token = tokens.get(character)
        if token is not None and token < allowed.size and allowed[token]:
            return token
    # Most vocabularies list long tokens last: prefer them to spell a name.
    return int(np.flatnonzero(allowed)[-1])
