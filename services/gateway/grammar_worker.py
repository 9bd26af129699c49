"""`python -m services.gateway.grammar_worker FOLDER`: checks grammars, one JSON string a line.

A schema may cost any amount of time and memory to compile. Here that harms nobody: the gateway
kills this process at a deadline, and it limits its own memory.
"""

import json
import resource
import sys
from pathlib import Path

from protocol.decoding.grammar import Grammar, check_grammar
from protocol.errors import ProtocolError, UsageError

_MEMORY_BYTES = 4 * 1024**3
_ANY_STOP = 0
"""Which token ends an answer makes no difference to what a grammar costs."""


def find_error(grammar: str, folder: Path) -> str:
    """Why a grammar cannot be used; empty if it can."""
    try:
        check_grammar(grammar)
        if (folder / "tokenizer.json").is_file():
            Grammar.start(grammar, folder, [_ANY_STOP]).compute_mask()
    except (UsageError, ProtocolError) as error:
        return str(error)
    except MemoryError:
        return "the answer's grammar or schema takes too much memory; simplify it"
    return ""


def main() -> None:
    """Answer each line of standard input with a line, until it ends."""
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    folder = Path(sys.argv[1])
    for line in sys.stdin:
        sys.stdout.write(json.dumps(find_error(json.loads(line), folder)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
