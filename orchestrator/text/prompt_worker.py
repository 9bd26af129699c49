"""`python -m orchestrator.text.prompt_worker SETTINGS`: the prompt worker process.

In a separate process, a text or a chat template that takes too much time or memory fails only its
request. The process ends with the orchestrator.
"""

import contextlib
import os
import resource
import sys
from pathlib import Path

import psutil

from orchestrator.text.tokenizer import TargetTokenizer
from protocol.errors import DeadlineExceeded, StreamEnded, UsageError
from protocol.messages import (
    EncodePrompt,
    PromptTokens,
    Rejected,
    Stop,
    ToPromptWorker,
    WorkerReady,
)
from protocol.process.child import run_child
from protocol.settings import PromptWorkerSettings
from protocol.transport.codec import Decoder
from protocol.transport.pipes import PipeChannel, take_pipes

_IDLE_S = 3600.0


def run(settings: PromptWorkerSettings) -> None:
    """Tokenise prompts until the orchestrator closes the pipe."""
    pipes = take_pipes()
    channel = PipeChannel[ToPromptWorker](*pipes, Decoder(ToPromptWorker))
    tokenizer = TargetTokenizer(Path(settings.model), parse_special=settings.parse_special)
    _limit_memory(settings.max_bytes)
    with contextlib.suppress(OSError):
        os.nice(5)  # decoding has priority
    channel.send(WorkerReady())
    with contextlib.suppress(StreamEnded):
        while True:
            with contextlib.suppress(DeadlineExceeded):
                message = channel.receive(_IDLE_S, "prompt")
                if isinstance(message, Stop):
                    return
                channel.send(_answer(tokenizer, message))


def _answer(tokenizer: TargetTokenizer, request: EncodePrompt) -> PromptTokens | Rejected:
    try:
        return PromptTokens(tokens=tokenizer.encode_prompt(request))
    except UsageError as error:
        return Rejected(str(error))
    except MemoryError:
        return Rejected("the prompt takes more memory than it may (prompt_memory_bytes)")


def _limit_memory(max_bytes: int) -> None:
    """Make allocations of more than `max_bytes` beyond the current use fail (Linux only)."""
    if max_bytes and sys.platform == "linux":
        limit = psutil.Process().memory_info().vms + max_bytes
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        if most == resource.RLIM_INFINITY or limit < most:
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if __name__ == "__main__":
    sys.exit(run_child("prompt worker", PromptWorkerSettings, run))
