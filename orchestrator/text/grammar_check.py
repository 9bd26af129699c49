"""Checks grammars in a worker process, within a deadline."""

from collections import OrderedDict

from orchestrator.text.worker_process import WorkerProcess
from protocol.decoding.grammar import check_size
from protocol.errors import UsageError
from protocol.messages import CheckGrammar, Rejected
from protocol.process.closeable import Closeable
from protocol.settings import TextWorkerSettings

_DEADLINE_S = 3.0
"""Processor time for one grammar; then the process is killed."""
_LONGEST_S = 15.0
"""Wall-clock limit for one grammar, however little processor time the process gets."""
_MEMORY_BYTES = 4 * 1024**3
_REMEMBERED = 256


class GrammarChecker(Closeable):
    """Checks grammars one after the other; caches the results.

    Args:
        folder: the model folder, for its tokenizer; if empty, only the syntax is checked.
        deadline_s: limit for one grammar in processor time; on a busy machine it takes longer.
    """

    def __init__(self, folder: str, deadline_s: float = _DEADLINE_S) -> None:
        settings = TextWorkerSettings(
            lifeline=0, model=folder, checks_grammars=True, max_bytes=_MEMORY_BYTES
        )
        self._worker = WorkerProcess(settings, "checks grammars")
        self._deadline_s = deadline_s
        self._known: OrderedDict[str, str] = OrderedDict()
        """Reason why each grammar cannot be used; empty if it can."""

    def prepare(self) -> None:
        """Start the process, which loads the tokenizer, before there is a grammar to check."""
        self._worker.prepare()

    def check(self, grammar: str) -> None:
        """Return if the models can use the grammar; blocks for seconds at worst.

        Raises:
            UsageError: the grammar cannot be used, or exceeds a limit that the message names.
            ServiceLost: other programs killed the checking process repeatedly.
        """
        check_size(grammar)
        if (reason := self._known.get(grammar)) is None:
            reason = self._known[grammar] = self._ask(grammar)
            while len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)
        if reason:
            raise UsageError(reason)

    def recall(self, grammar: str) -> str | None:
        """Return a cached error of `check`, "" if the grammar is usable, None if it is unknown."""
        return self._known.get(grammar)

    def _ask(self, grammar: str) -> str:
        match self._worker.ask(CheckGrammar(grammar=grammar), _LONGEST_S, self._deadline_s):
            case Rejected(reason=reason):
                return reason
            case "late":
                return (
                    f"the answer's grammar or schema takes more than {self._deadline_s:g} s to "
                    "compile; simplify its patterns and references"
                )
            case "broken":
                return "the answer's grammar or schema cannot be compiled; simplify it"
            case _:
                return ""

    def close(self) -> None:
        """End the process even while it works; later grammars are rejected."""
        self._worker.close()
