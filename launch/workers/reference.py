"""The reference process (mlx-lm itself) for the benchmark and the tests."""

import os

from launch.models.pair import Pair
from launch.workers.worker import JsonWorker
from protocol.jobs.reference import (
    BatchDecodeRequest,
    BatchDecodeResult,
    DecodeRequest,
    DecodeResult,
    MarginRequest,
    MarginResult,
    ReferenceSettings,
)
from protocol.messages import Sampling, Tokens
from protocol.settings import Device


class ReferenceWorker(JsonWorker):
    """mlx-lm in a separate process, with all cores."""

    def __init__(self, pair: Pair, device: Device = "") -> None:
        settings = ReferenceSettings(
            model=pair.model,
            # mlx-lm cannot load the models of other backends.
            draft_model=pair.draft_model if pair.backend == "mlx" else "",
            threads=os.cpu_count() or 1,
            device=device,
            adapter=pair.adapter,
        )
        super().__init__("reference", "services.tools.reference", settings, device=device)

    def await_loaded(self) -> None:
        """Return when its models are loaded, and it no longer takes cores from other processes."""
        self.margin([0], (0, 1), Sampling())

    def decode(self, question: DecodeRequest) -> DecodeResult:
        """Return mlx-lm's answer."""
        return self.ask(question, DecodeResult)

    def decode_many(self, question: BatchDecodeRequest) -> BatchDecodeResult:
        """Return mlx-lm's answers to many prompts, in batches."""
        return self.ask(question, BatchDecodeResult)

    def parting(
        self, prompt: Tokens, expected: Tokens, tokens: Tokens, sampling: Sampling
    ) -> tuple[int, MarginResult | None]:
        """Return where an answer departs from the expected one, and how close to a tie that is.

        Position -1, and no margin, if one of them is a prefix of the other.
        """
        pairs = enumerate(zip(expected, tokens, strict=False))
        at = next((i for i, (a, b) in pairs if a != b), -1)
        if at < 0:
            return at, None
        return at, self.margin(prompt + expected[:at], (expected[at], tokens[at]), sampling)

    def margin(
        self, tokens: Tokens, candidates: tuple[int, int], sampling: Sampling
    ) -> MarginResult:
        """Return how close to a tie two candidates for the token after `tokens` are, in logits."""
        return self.ask(MarginRequest(tokens, candidates, sampling), MarginResult)
