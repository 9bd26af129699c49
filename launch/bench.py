"""`ssd bench`: modes side by side, prompt by prompt, with the losslessness check."""

import importlib.resources
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles

from msgspec import structs
from rich.table import Table

from launch.prompts import Prompt, PromptId, read_prompts
from launch.yardstick import LARGEST_TIE, Yardstick
from orchestrator.tokenizer import TargetTokenizer
from protocol.client import Client
from protocol.errors import LosslessnessError
from protocol.messages import ChatMessage, Finished, Generate, Mode, Sampling, Statistics, Tokens
from protocol.sampling import by_rejection
from protocol.yardstick import Decode

OUR_MODES: tuple[Mode, ...] = ("ar", "sd", "ssd")
REFERENCE_MODES = {"mlx-lm": 0, "mlx-lm-draft": 3}
"""mlx-lm's own generation, and its number of draft tokens (3 is its default)."""
MODES = (*OUR_MODES, *REFERENCE_MODES)

_WARM_UP_TOKENS = 16


@dataclass
class Run:
    """One answer in one mode."""

    prompt: PromptId
    category: str
    mode: str
    tokens: Tokens
    ttft_ms: float
    decode_s: float
    statistics: Statistics | None = None

    @property
    def tok_s(self) -> float:
        """Decoded tokens per second, without the first."""
        return (len(self.tokens) - 1) / self.decode_s if self.decode_s else 0.0


@dataclass
class Divergence:
    """Where a mode left plain decoding."""

    prompt: PromptId
    mode: str
    position: int
    margin: float


@dataclass
class Bench:
    """Runs prompts in several modes, interleaved, and keeps what happened."""

    client: Client
    yardstick: Yardstick
    tokenizer: TargetTokenizer
    modes: tuple[str, ...]
    sampling: Sampling
    max_tokens: int
    runs: list[Run] = field(default_factory=list)
    divergences: list[Divergence] = field(default_factory=list)

    def run(self, prompts: list[Prompt], progress: Callable[[str], None]) -> None:
        """Measure every prompt in every mode, one mode after the other per prompt."""
        warm_up = Prompt(prompts[0].prompt)
        for mode in self.modes:
            self._answer(warm_up, mode, _WARM_UP_TOKENS)
        for number, prompt in enumerate(prompts, start=1):
            # The order rotates, so that no mode always runs on the warmest machine.
            turn = number % len(self.modes)
            for mode in (*self.modes[turn:], *self.modes[:turn]):
                progress(f"{number}/{len(prompts)} {prompt.id} {mode}")
                self.runs.append(self._answer(prompt, mode, self.max_tokens))
            self._compare(prompt)

    def _answer(self, prompt: Prompt, mode: str, max_tokens: int) -> Run:
        messages = [ChatMessage("user", prompt.prompt)]
        if mode in REFERENCE_MODES:
            question = Decode(
                self.tokenizer.encode(messages),
                max_tokens,
                sorted(self.tokenizer.stop_ids),
                REFERENCE_MODES[mode],
            )
            decoded = self.yardstick.decode(question)
            return Run(
                prompt.id, prompt.category, mode, decoded.tokens, decoded.ttft_ms, decoded.decode_s
            )
        request = Generate(
            request=self.client.number(),
            messages=messages,
            sampling=self.sampling,
            max_tokens=max_tokens,
            mode=next(name for name in OUR_MODES if name == mode),
        )
        tokens: Tokens = []
        for message in self.client.generate(request):
            if isinstance(message, Finished):
                s = message.statistics
                return Run(prompt.id, prompt.category, mode, tokens, s.ttft_ms, s.decode_s, s)
            tokens += message.tokens
        raise AssertionError("an answer ends with Finished")

    def _compare(self, prompt: Prompt) -> None:
        """Every mode of ours must give the tokens of plain decoding; a tie is measured."""
        if by_rejection(self.sampling):
            return  # other random numbers in every mode
        runs = {run.mode: run for run in self.runs if run.prompt == prompt.id}
        plain = runs.get("ar")
        for mode, run in runs.items():
            if plain is None or mode not in OUR_MODES or run.tokens == plain.tokens:
                continue
            pairs = zip(plain.tokens, run.tokens, strict=False)
            at = next((i for i, (a, b) in enumerate(pairs) if a != b), -1)
            margin = float("inf")  # one answer is the beginning of the other
            if at >= 0:
                prefix = self.tokenizer.encode([ChatMessage("user", prompt.prompt)])
                margin = self.yardstick.margin(
                    prefix + plain.tokens[:at],
                    (plain.tokens[at], run.tokens[at]),
                    self.sampling,
                )
            self.divergences.append(Divergence(prompt.id, mode, at, margin))

    def check(self) -> None:
        """Raises LosslessnessError if a mode differed by more than a rounding tie."""
        wrong = [d for d in self.divergences if d.margin > LARGEST_TIE]
        if wrong:
            first = wrong[0]
            raise LosslessnessError(
                f"{len(wrong)} answers differ from plain decoding; first: {first.mode} on "
                f"{first.prompt!r} at token {first.position}, logit margin {first.margin:.2g}"
            )

    def verdict(self) -> str:
        """What `check` has found to be true."""
        if by_rejection(self.sampling):
            return "rejection rule: every mode has the same law, not the same tokens (not compared)"
        ties = len(self.divergences)
        return f"lossless: every mode gave the tokens of plain decoding ({ties} rounding ties)"


def chosen_prompts(path: Path | None, limit: int) -> list[Prompt]:
    """The prompts of a file, or our own small set, each with an id; evenly thinned to `limit`."""
    own = Path(str(importlib.resources.files("launch"))) / "bench_prompts.jsonl"
    prompts = [
        prompt if prompt.id != "" else structs.replace(prompt, id=number)
        for number, prompt in enumerate(read_prompts(path or own), start=1)
    ]
    step = max(1, len(prompts) // limit) if limit else 1
    return prompts[::step][: limit or None]


def table(bench: Bench) -> Table:
    """One row per category and mode: medians, and the speed relative to plain decoding."""
    result = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("", "mode", "tok/s", "quartiles", "x ar", "TTFT ms", "accept", "len", "hits"):
        result.add_column(name, justify="left" if name in ("", "mode") else "right")
    categories = list(dict.fromkeys(run.category for run in bench.runs))
    for category in [*categories, "all"] if len(categories) > 1 else categories:
        for mode in bench.modes:
            result.add_row(*_row(bench, category, mode))
    return result


def _row(bench: Bench, category: str, mode: str) -> list[str]:
    runs = [r for r in bench.runs if r.mode == mode and category in ("all", r.category)]
    speeds = [run.tok_s for run in runs]
    plain = {run.prompt: run.tok_s for run in bench.runs if run.mode == "ar"}
    ratios = [run.tok_s / plain[run.prompt] for run in runs if plain.get(run.prompt)]
    low, _, high = quantiles(speeds, n=4) if len(speeds) > 1 else (speeds[0],) * 3
    cells = [category, mode, f"{median(speeds):.1f}", f"{low:.1f}-{high:.1f}"]
    cells += [f"{median(ratios):.2f}" if ratios else "-"]
    cells += [f"{median(run.ttft_ms for run in runs):.0f}"]
    statistics = [run.statistics for run in runs if run.statistics and run.statistics.drafted]
    if not statistics:
        return [*cells, "-", "-", "-"]
    accepted = sum(s.accepted for s in statistics)
    looked_up = sum(s.cache_hits + s.cache_misses for s in statistics)
    return [
        *cells,
        f"{accepted / sum(s.drafted for s in statistics):.2f}",
        f"{1 + accepted / sum(s.rounds for s in statistics):.2f}",
        f"{sum(s.cache_hits for s in statistics) / looked_up:.2f}" if looked_up else "-",
    ]


def phases(bench: Bench) -> Table:
    """Medians over prompts of the per-round times of `ssd`."""
    result = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    result.add_column("ssd, per round")
    result.add_column("median ms", justify="right")
    statistics = [r.statistics for r in bench.runs if r.mode == "ssd" and r.statistics]
    names = dict.fromkeys(name for s in statistics for name in s.phase_ms)
    for name in names:
        values = [s.phase_ms[name] for s in statistics if name in s.phase_ms]
        result.add_row(name, f"{median(values):.3f}")
    return result
