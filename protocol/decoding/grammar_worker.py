"""`python -m protocol.decoding.grammar_worker [FOLDER]`: checks grammars, one JSON string a line.

A schema may cost any amount of time and memory to compile. In this process that harms no other
request: the parent kills it at a deadline, and it limits itself. A grammar that is accepted here is
accepted by the models, which compile it again within the same limits.
"""

import contextlib
import json
import resource
import signal
import sys
import time
from pathlib import Path

import numpy as np

from protocol.decoding.grammar import Grammar, check_grammar
from protocol.errors import ProtocolError, UsageError

DEADLINE_S = 3.0
"""Processor time for one grammar; then the process is killed."""
_ALARM_S = 10.0
"""Limit that the process sets itself, in case its parent has died."""
_MEMORY_BYTES = 4 * 1024**3
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


def main() -> None:
    """Answer each line of standard input with a line, until it ends."""
    with contextlib.suppress(ValueError, OSError):  # not available on every system
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    if folder is not None and not (folder / "tokenizer.json").is_file():
        folder = None
    sys.stdout.write(json.dumps(find_grammar_error('start: "a"', folder)) + "\n")
    sys.stdout.flush()
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, _ALARM_S)
        reason = find_grammar_error(json.loads(line), folder)
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        sys.stdout.write(json.dumps(reason) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
