"""The cost of a grammar: of compiling it, and of the first steps of an answer.

A schema may cost any amount of time and memory: run this in a process that may be killed. A grammar
that is accepted here is accepted by the models, which compile it again within the same limits.
"""

import time
from pathlib import Path

import numpy as np

from protocol.decoding.grammar import Grammar, check_grammar
from protocol.errors import ProtocolError, UsageError

MAX_COMPILE_S = 1.0
"""Processor time to compile: the models compile inline with other work."""
MAX_MASK_S = 0.25
"""Processor time for the mask of one token."""
_STOP = 0  # whichever it is, a grammar costs the same
_STEPS = 24
"""Tokens of a sample answer."""
_STRIDE = 7919
"""Stride through the allowed tokens, so that the sample answer is deterministic."""


def find_grammar_error(grammar: str, folder: Path | None) -> str:
    """Return why a grammar cannot be used; empty if it can. No folder: check its syntax only."""
    try:
        if folder is not None:
            # The tokenizer is loaded before the first grammar is timed.
            Grammar.start('start: "a"', folder, [_STOP])
        started = time.process_time()
        check_grammar(grammar)
        validated = time.process_time() - started
        if folder is None:
            return ""
        started = time.process_time()
        matcher = Grammar.start(grammar, folder, [_STOP])
        compiled = max(validated, time.process_time() - started)
        if compiled > MAX_COMPILE_S:
            return (
                f"the answer's grammar or schema takes {compiled:.1f} s to compile; at most "
                f"{MAX_COMPILE_S:g} s are taken: simplify its patterns and references"
            )
        return _try_answer(matcher)
    except (UsageError, ProtocolError) as error:
        return str(error)
    except MemoryError:
        return "the answer's grammar or schema takes too much memory; simplify it"


def _try_answer(grammar: Grammar) -> str:
    """Return the error in the first steps of a sample answer; empty if there is none."""
    for step in range(_STEPS):
        started = time.process_time()
        allowed = np.flatnonzero(grammar.compute_mask())
        taken = time.process_time() - started
        if taken > MAX_MASK_S:
            return (
                f"the answer's grammar or schema takes {taken:.2f} s for a token; at most "
                f"{MAX_MASK_S:g} s are taken: simplify it"
            )
        if not allowed.size or not grammar.advance(int(allowed[step * _STRIDE % allowed.size])):
            break
    return ""
