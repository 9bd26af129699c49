"""The reference process (mlx-lm itself) as the benchmark and the tests use it."""

import os
import subprocess
import sys
from typing import TypeVar

import msgspec

from launch.config import child_environment
from launch.models import Pair
from protocol.child import ERROR_PREFIX
from protocol.closing import Closing
from protocol.errors import RuntimeFailure
from protocol.messages import Sampling, Tokens
from protocol.settings import Device, ReferenceSettings, encode_settings
from protocol.yardstick import (
    Decode,
    Decoded,
    DecodedMany,
    DecodeMany,
    Margin,
    MarginAnswer,
    Question,
)

A = TypeVar("A")

LARGEST_TIE = 1e-3
"""Two tokens whose scores are closer than this (in logits) are a rounding tie."""


class Yardstick(Closing):
    """mlx-lm in a process of its own, with all cores."""

    def __init__(self, pair: Pair, device: Device = "", emulated_cost: str = "") -> None:
        settings = ReferenceSettings(
            model=pair.model,
            # mlx-lm cannot load the models of other backends.
            draft_model=pair.draft_model if pair.backend == "mlx" else "",
            threads=os.cpu_count() or 1,
            device=device,
            emulated_cost=emulated_cost,
        )
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "services.reference", encode_settings(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=child_environment(device),
        )

    def decode(self, question: Decode) -> Decoded:
        """mlx-lm's own answer; raises RuntimeFailure if the process fails."""
        return self._ask(question, Decoded)

    def decode_many(self, question: DecodeMany) -> DecodedMany:
        """mlx-lm's own answers to many prompts, in batches."""
        return self._ask(question, DecodedMany)

    def margin(self, tokens: Tokens, candidates: tuple[int, int], sampling: Sampling) -> float:
        """How near a tie two candidates for the token after `tokens` are, in logits."""
        return self._ask(Margin(tokens, candidates, sampling), MarginAnswer).margin

    def _ask(self, question: Question, kind: type[A]) -> A:
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeFailure("the reference process has no pipes")
        try:
            self._process.stdin.write(msgspec.json.encode(question).decode() + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise RuntimeFailure(self._last_words()) from error
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeFailure(self._last_words())
        return msgspec.json.decode(line, type=kind)

    def _last_words(self) -> str:
        rest = self._process.stderr.read() if self._process.stderr else ""
        lines = [line for line in rest.splitlines() if line.strip()] or ["no reason given"]
        return f"the reference process failed: {lines[-1].removeprefix(ERROR_PREFIX)}"

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()
