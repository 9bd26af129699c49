"""A short way to the end of an answer that is bound to a grammar, so that a limit cuts no JSON.

The way need not be the shortest: at each place the token that closes most is taken, which ends
strings, arrays and objects and writes the shortest values that are required.
"""

import numpy as np

from protocol.decoding.grammar import AllowedMask, Grammar
from protocol.errors import ProtocolError
from protocol.messages import Tokens

_CLOSING = tuple('}],:0"tfn123456789-[{')
"""Characters between values, those first that close the most."""
_IN_STRING = ("z", "}")
"""Characters that are allowed together within a string only."""


def find_end(grammar: Grammar, most: int) -> Tokens | None:
    """The tokens of a way to the answer's end, its stop token included.

    Args:
        grammar: after the answer so far; it is not moved.
        most: tokens of it.

    Returns:
        None if no way of that length was found.
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
        return None  # it costs too much to look at: the answer goes on as it would
    return None


def _choose(tokens: dict[str, int], allowed: AllowedMask) -> int:
    """The allowed token that closes most; `tokens` are those of single characters."""
    in_string = all(c in tokens and allowed[tokens[c]] for c in _IN_STRING)
    for character in '"' if in_string else _CLOSING:
        token = tokens.get(character)
        if token is not None and token < allowed.size and allowed[token]:
            return token
    # Of the ways to spell a name, long tokens come last in most vocabularies.
    return int(np.flatnonzero(allowed)[-1])
