"""`python -m orchestrator.text.worker SETTINGS`: tokenises prompts, or checks grammars.

In a separate process, a text, a chat template or a grammar that takes too much time or memory fails
only its request. The process ends with the orchestrator.
"""

import contextlib
import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import psutil

from protocol.errors import DeadlineExceeded, StreamEnded, UsageError
from protocol.messages import (
    CheckGrammar,
    Done,
    EncodePrompt,
    FromTextWorker,
    PromptTokens,
    Rejected,
    Stop,
    ToTextWorker,
    WorkerReady,
)
from protocol.process.child import run_child
from protocol.settings import TextWorkerSettings
from protocol.transport.codec import Decoder
from protocol.transport.pipes import PipeChannel, take_pipes

_IDLE_S = 3600.0
_ALARM_S = 10.0
"""Processor time for a grammar, in case the parent has died: compiling blocks all threads."""

Work = Callable[[EncodePrompt | CheckGrammar], FromTextWorker]


def run(settings: TextWorkerSettings) -> None:
    """Answer messages until the orchestrator closes the pipe."""
    channel = PipeChannel[ToTextWorker](*take_pipes(), Decoder(ToTextWorker))
    answer = _check_grammars(settings) if settings.checks_grammars else _tokenise(settings)
    _limit_memory(settings.max_bytes)
    channel.send(WorkerReady())
    with contextlib.suppress(StreamEnded):
        while True:
            with contextlib.suppress(DeadlineExceeded):
                message = channel.receive(_IDLE_S, "message")
                if isinstance(message, Stop):
                    return
                channel.send(answer(message))


def _tokenise(settings: TextWorkerSettings) -> Work:
    from orchestrator.text.tokenizer import TargetTokenizer  # noqa: PLC0415

    with contextlib.suppress(OSError):
        os.nice(5)  # decoding has priority
    tokenizer = TargetTokenizer(Path(settings.model), parse_special=settings.parse_special)

    def encode(message: EncodePrompt | CheckGrammar) -> FromTextWorker:
        if isinstance(message, CheckGrammar):
            return Rejected("this process tokenises prompts")
        try:
            return PromptTokens(tokens=tokenizer.encode_prompt(message))
        except UsageError as error:
            return Rejected(str(error))
        except MemoryError:
            return Rejected("the prompt takes more memory than it may (prompt_memory_bytes)")

    return encode


def _check_grammars(settings: TextWorkerSettings) -> Work:
    from orchestrator.text.grammar_cost import find_grammar_error  # noqa: PLC0415

    folder = Path(settings.model) if settings.model else None
    if folder is not None and not (folder / "tokenizer.json").is_file():
        folder = None
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    find_grammar_error('start: "a"', folder)  # loads the tokenizer

    def check(message: EncodePrompt | CheckGrammar) -> FromTextWorker:
        if isinstance(message, EncodePrompt):
            return Rejected("this process checks grammars")
        signal.setitimer(signal.ITIMER_PROF, _ALARM_S)
        reason = find_grammar_error(message.grammar, folder)
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        return Rejected(reason) if reason else Done()

    return check


def _limit_memory(max_bytes: int) -> None:
    """Make allocations of more than `max_bytes` beyond the current use fail (Linux only)."""
    if max_bytes and sys.platform == "linux":
        limit = psutil.Process().memory_info().vms + max_bytes
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        if most == resource.RLIM_INFINITY or limit < most:
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if __name__ == "__main__":
    sys.exit(run_child("text worker", TextWorkerSettings, run))
