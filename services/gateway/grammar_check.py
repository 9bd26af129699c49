"""Whether a grammar can be used, found out in a process of its own, within a deadline."""

import asyncio
import contextlib
import json
import logging
import sys
from collections import OrderedDict

from protocol.errors import RuntimeFailure, UsageError

_log = logging.getLogger(__name__)

_DEADLINE_S = 3.0
"""For one grammar. The models compile it in line with other work."""
_START_S = 20.0
"""For the process to start, libraries included."""
_REMEMBERED = 256
_LINE_BYTES = 1024 * 1024


class GrammarChecker:
    """Checks grammars one after the other; remembers those that were checked."""

    def __init__(self, folder: str) -> None:
        """`folder`: the model folder, for its tokenizer."""
        self._folder = folder
        self._lock = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._known: OrderedDict[str, str] = OrderedDict()
        """Grammar -> why it cannot be used; empty if it can."""

    async def check(self, grammar: str) -> None:
        """Raises UsageError if the grammar cannot be used, or costs too much to find out."""
        if grammar not in self._known:
            async with self._lock:
                if grammar not in self._known:
                    self._known[grammar] = await self._ask(grammar)
        self._known.move_to_end(grammar)
        reason = self._known[grammar]
        while len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)
        if reason:
            raise UsageError(reason)

    async def _ask(self, grammar: str) -> str:
        try:
            process = await self._start()
        except (TimeoutError, EOFError, OSError, asyncio.CancelledError) as error:
            self.close()
            if isinstance(error, asyncio.CancelledError):
                raise
            raise RuntimeFailure("the process that checks grammars does not start") from error
        answered = False
        try:
            async with asyncio.timeout(_DEADLINE_S):
                reason = await _exchange(process, grammar)
            answered = True
        except TimeoutError:
            _log.warning("a grammar of %d characters takes too long to compile", len(grammar))
            reason = (
                f"the answer's grammar or schema takes more than {_DEADLINE_S:g} s to compile; "
                "simplify its patterns and references"
            )
        except (EOFError, OSError, ValueError):
            reason = "the answer's grammar or schema cannot be compiled; simplify it"
        finally:  # a cancelled request leaves its answer in the pipe
            if not answered:
                self.close()
        return reason

    async def _start(self) -> asyncio.subprocess.Process:
        if self._process is not None and self._process.returncode is None:
            return self._process
        async with asyncio.timeout(_START_S):
            process = self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "services.gateway.grammar_worker", self._folder),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=_LINE_BYTES,
            )
            await _exchange(process, 'start: "a"')  # the libraries are loaded now
            return process

    def close(self) -> None:
        """End the process; the next grammar starts another."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
        self._process = None


async def _exchange(process: asyncio.subprocess.Process, grammar: str) -> str:
    """The answer to a grammar; raises EOFError if the process is gone."""
    assert process.stdin is not None  # noqa: S101  # it was started with pipes
    assert process.stdout is not None  # noqa: S101
    process.stdin.write(json.dumps(grammar).encode() + b"\n")
    await process.stdin.drain()
    if not (line := await process.stdout.readline()):
        raise EOFError
    return str(json.loads(line))
