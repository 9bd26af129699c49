"""A process of the stack that dies, or hangs, whenever it works for a prompt with a certain token.

Run as `python -m tests.hostile.poisoned MODULE SETTINGS`, in place of the honest MODULE: as a
fault in a library that one request reaches.
"""

import os
import runpy
import signal
import sys
import time
from typing import Any

from orchestrator.requests.request import Request
from protocol.messages import DraftNow, OpenSequence, Prepare, Verify
from services.runtime import loop

DEADLY, PARALYSING = 201, 202
"""Tokens."""


def _suffer(tokens: list[int]) -> None:
    if DEADLY in tokens:
        os.kill(os.getpid(), signal.SIGSEGV)
    while PARALYSING in tokens:
        time.sleep(1e9)


def _poison_service() -> None:
    honest, prompts = loop._step, dict[int, list[int]]()

    def step(job: Any, *others: Any) -> None:
        message = job.message
        if isinstance(message, OpenSequence):
            prompts[message.sequence] = message.tokens
        if isinstance(message, Verify | Prepare | DraftNow):
            _suffer(prompts[message.sequence])
        honest(job, *others)

    loop._step = step


def _poison_orchestrator() -> None:
    honest = Request.add_tokens

    def add_tokens(self: Request, *others: Any) -> Any:
        _suffer(self.sequence.tokens)
        return honest(self, *others)

    Request.add_tokens = add_tokens  # type: ignore[method-assign]  # that is the fault


if __name__ == "__main__":
    module = sys.argv.pop(1)
    _poison_orchestrator() if module == "orchestrator.main" else _poison_service()
    runpy.run_module(module, run_name="__main__", alter_sys=False)
