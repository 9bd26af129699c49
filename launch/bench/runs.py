"""The runs: every prompt in every mode, interleaved, and the comparison of their tokens."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from launch.bench.memory import MemoryWatch
from launch.bench.result import BenchRun, Checks, Divergence
from launch.bench.variant import Variant
from launch.prompts import Prompt
from launch.workers.reference import ReferenceWorker
from orchestrator.text.tokenizer import TargetTokenizer
from protocol.client.client import Client
from protocol.decoding.sampling_params import uses_rejection
from protocol.errors import LosslessnessError, RuntimeFailure
from protocol.jobs.reference import DecodeRequest
from protocol.messages import (
    ChatMessage,
    Finished,
    Generate,
    Sampling,
    Statistics,
    Tokens,
    TraceEvent,
)

_WARM_UP_TOKENS = 24
_TRACED = "ssd"
_SLICES_KEPT = 400
"""Entries of an answer's timeline to keep: some dozens of rounds."""

_COUNTS = ("rounds", "drafted", "accepted", "per_position", "cache_hits", "cache_misses")

Progress = Callable[[str], None]
_Answered = tuple[Tokens, float, float, Statistics | None, list[TraceEvent]]
"""Tokens, ttft_ms, decode_s, and the statistics that only our stack has."""


@dataclass
class Bench:
    """Runs prompts in several modes and records the results."""

    clients: dict[str, Client]
    """Clients by the drafter that a variant names; empty is the command line's."""
    reference: ReferenceWorker
    tokenizer: TargetTokenizer
    memory: MemoryWatch
    variants: tuple[Variant, ...]
    samplings: tuple[Sampling, ...]
    """One per temperature."""
    max_tokens: int
    repeats: int = 1
    runs: list[BenchRun] = field(default_factory=list)
    divergences: list[Divergence] = field(default_factory=list)
    compared: int = 0

    def steps(self, prompts: list[Prompt]) -> int:
        """Return how often `run` will call its progress."""
        return len(self.variants) * len(self.samplings) * (1 + self.repeats * len(prompts))

    def run(self, prompts: list[Prompt], progress: Progress) -> None:
        """Measure every prompt in every mode, one mode after the other per prompt."""
        for sampling in self.samplings:
            for variant in self.variants:
                progress(f"warm-up {variant.label}")
                self._answer(Prompt(prompts[0].prompt), variant, sampling, _WARM_UP_TOKENS, 0)
        for repeat in range(self.repeats):
            for number, prompt in enumerate(prompts):
                for sampling in self.samplings:
                    self._round(prompt, sampling, repeat, number + repeat, progress)

    def _round(
        self, prompt: Prompt, sampling: Sampling, repeat: int, turn: int, progress: Progress
    ) -> None:
        """Decode one prompt in all modes; their order rotates, so that none is always the first."""
        turn %= len(self.variants)
        done: dict[str, BenchRun] = {}
        for variant in (*self.variants[turn:], *self.variants[:turn]):
            progress(f"{prompt.id} {variant.label}")
            run = self._answer(prompt, variant, sampling, self.max_tokens, repeat)
            done[variant.label] = run
        for variant in self.variants:
            self.runs.append(done[variant.label])
            if "ar" in done and variant.mode != "ar" and comparable(variant, sampling):
                self._compare(prompt, sampling, done["ar"], done[variant.label])

    # ------------------------------------------------------------ one answer

    def _answer(
        self, prompt: Prompt, variant: Variant, sampling: Sampling, max_tokens: int, repeat: int
    ) -> BenchRun:
        messages = [ChatMessage("user", prompt.prompt)]
        prompt_tokens = self.tokenizer.encode(messages)
        ask = self._reference if variant.is_reference else self._ours
        tokens, ttft_ms, decode_s, statistics, timeline = ask(
            prompt_tokens, variant, sampling, max_tokens
        )
        return BenchRun(
            prompt_id=prompt.id,
            category=prompt.category,
            mode=variant.label,
            repeat=repeat,
            temperature=sampling.temperature,
            prompt_tokens=len(prompt_tokens),
            tokens=len(tokens),
            ttft_ms=ttft_ms,
            decode_tps=(len(tokens) - 1) / decode_s if decode_s else 0.0,
            decode_s=decode_s,
            peak_memory_gb=self.memory.peaks_gb(),
            output_sha256=digest(tokens),
            statistics=statistics,
            timeline=timeline,
            emitted=tokens,
            **_counts(statistics),
        )

    def _reference(
        self, prompt: Tokens, variant: Variant, sampling: Sampling, max_tokens: int
    ) -> _Answered:
        stops = sorted(self.tokenizer.stop_ids)
        question = DecodeRequest(prompt, max_tokens, stops, variant.num_draft_tokens, sampling)
        decoded = self.reference.decode(question)
        return decoded.tokens, decoded.ttft_ms, decoded.decode_s, None, []

    def _ours(
        self, prompt: Tokens, variant: Variant, sampling: Sampling, max_tokens: int
    ) -> _Answered:
        client = self.clients[variant.drafter]
        template = Generate(
            request=client.number(),
            tokens=prompt,
            sampling=sampling,
            max_tokens=max_tokens,
            trace=variant.mode == _TRACED,
        )
        tokens: Tokens = []
        for message in client.generate(variant.request(template)):
            if not isinstance(message, Finished):
                tokens += message.tokens
                continue
            if message.error:
                raise RuntimeFailure(f"{variant.label}: {message.error}")
            s = message.statistics
            return tokens, s.ttft_ms, s.decode_s, s, message.timeline[:_SLICES_KEPT]
        raise RuntimeFailure("an answer did not end")

    # ------------------------------------------------------------ the same tokens

    def _compare(self, prompt: Prompt, sampling: Sampling, plain: BenchRun, run: BenchRun) -> None:
        """Check that every mode gave the tokens of plain decoding; measure ties."""
        self.compared += 1
        if run.emitted == plain.emitted:
            return
        prompt_tokens = self.tokenizer.encode([ChatMessage("user", prompt.prompt)])
        at, tie_check = self.reference.parting(prompt_tokens, plain.emitted, run.emitted, sampling)
        self.divergences.append(
            Divergence(
                prompt_id=prompt.id,
                mode=run.mode,
                repeat=run.repeat,
                temperature=run.temperature,
                position=at,
                margin=None if tie_check is None else tie_check.margin,
                tie=tie_check is not None and tie_check.is_tie,
            )
        )

    def checks(self) -> Checks:
        """Return the comparisons, and their results."""
        left_out = [
            variant.label
            for variant in self.variants
            if any(not comparable(variant, sampling) for sampling in self.samplings)
        ]
        wrong = [divergence for divergence in self.divergences if not divergence.tie]
        return Checks(
            lossless=not wrong if self.compared else None,
            compared=self.compared,
            rounding_ties=len(self.divergences) - len(wrong),
            not_compared=f"{', '.join(left_out)}: other random numbers" if left_out else "",
            divergences=self.divergences,
        )


def _counts(statistics: Statistics | None) -> dict[str, Any]:
    """Return the statistics that a run repeats; mlx-lm has none."""
    if statistics is None:
        return {}
    return {name: getattr(statistics, name) for name in _COUNTS}


def comparable(variant: Variant, sampling: Sampling) -> bool:
    """Return True if this mode must give the tokens of plain decoding."""
    return not variant.is_reference and not uses_rejection(variant.sampling(sampling))


def digest(tokens: Tokens) -> str:
    """Return the SHA-256 of an answer's token ids."""
    return hashlib.sha256(",".join(map(str, tokens)).encode()).hexdigest()


def require_lossless(checks: Checks) -> None:
    """Raise LosslessnessError if a mode differed by more than a rounding tie."""
    wrong = [divergence for divergence in checks.divergences if not divergence.tie]
    if wrong:
        first = wrong[0]
        margin = "one ends early" if first.margin is None else f"logit margin {first.margin:.2g}"
        raise LosslessnessError(
            f"{len(wrong)} answers differ from plain decoding; first: {first.mode} on "
            f"{first.prompt_id!r} at token {first.position}, {margin}"
        )


def verdict(checks: Checks) -> str:
    """Summarise the checks in a sentence."""
    rest = f" ({checks.not_compared})" if checks.not_compared else ""
    if checks.lossless is None:
        return f"losslessness was not checked: nothing to compare with plain decoding{rest}"
    return (
        f"lossless: {checks.compared} answers have the tokens of plain decoding, "
        f"{checks.rounding_ties} of them up to a rounding tie{rest}"
    )
