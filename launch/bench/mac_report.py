"""The file that `ssd mac-check` writes for bug reports, and its readable form."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from launch.bench.bandwidth import describe_ceiling, describe_share
from launch.workers.kernel_report import describe_kernels
from protocol.jobs.coreml_probe import ProbeResult
from protocol.jobs.kernel_report import KernelReport

TEMPERATURE = 0.8
"""Temperature of all answers."""

_PATH = re.compile(r"(?<![\w.])(?:~?(?:/[^\s/'\"]+)+|~)/")
"""The folders of a path, which are removed: the file is meant to be published."""


class MeasuredAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """One answer of a stack."""

    mode: str
    num_draft_tokens: int
    """0: chosen by the planner."""
    tokens: int
    tok_s: float
    accepted: int
    drafted: int
    cache_hits: int
    cache_misses: int
    same_as_plain: bool


class MacReport(msgspec.Struct, frozen=True, kw_only=True):
    """The file that a user can attach to a bug report."""

    format: int = 1
    date: str
    machine: dict[str, str]
    versions: dict[str, str]
    model: str
    package: dict[str, Any]
    """The manifest of the converted model, the comparison included."""
    weight_bytes: int = 0
    """Bytes of weights that each pass of plain decoding reads."""
    read_bytes_s: float = 0.0
    """Rate at which this machine reads them, in bytes per second."""
    probes: list[ProbeResult] = []
    overlap: dict[str, list[ProbeResult]] = {}
    """"alone": draft and target loop one after the other; "together": at the same time."""
    kernels: KernelReport = KernelReport()
    """Trials of our Metal kernels for few rows, and of whole passes without and with them."""
    answers: list[MeasuredAnswer] = []
    stack: str = ""
    """Target and drafter of `answers`."""
    answers_failed: str = ""
    """Reason why answers are missing."""
    not_measured: list[str] = []


def without_paths(report: MacReport) -> MacReport:
    """Return the report with bare names in place of paths, which may contain people's names."""
    return msgspec.convert(_bare(json.loads(msgspec.json.encode(report))), MacReport)


def _bare(value: Any) -> Any:
    match value:
        case str():
            # The home folder first: it may contain spaces, which in a sentence end a path.
            return _PATH.sub("", value.replace(f"{Path.home()}/", "~/"))
        case list():
            return [_bare(item) for item in value]
        case dict():
            return {key: _bare(item) for key, item in value.items()}
    return value


def lines(report: MacReport) -> Iterator[str]:
    """Yield the readable form."""
    yield f"{report.model} on {report.machine['system']}, {report.date}"
    if ceiling := describe_ceiling(report.weight_bytes, report.read_bytes_s):
        yield ceiling
    for probe in report.probes:
        yield from format_probe(probe)
    for when, loops in report.overlap.items():
        for loop in loops:
            for text in format_probe(loop):
                yield f"{when}: {text}"
    for text in describe_kernels(report.kernels):
        yield f"GPU kernels: {text}"
    yield from _format_answers(report)
    if report.answers_failed:
        yield f"answers: no more figures, {report.answers_failed}"
    for what in report.not_measured:
        yield f"not measured here: {what}"


def _format_answers(report: MacReport) -> Iterator[str]:
    for answer in report.answers:
        yield (
            f"{answer.mode}{f' K={answer.num_draft_tokens}' if answer.num_draft_tokens else ''} "
            f"at T={TEMPERATURE}: {answer.tok_s:.1f} tok/s, "
            f"{_format_drafts(answer)}, "
            f"{'same' if answer.same_as_plain else 'OTHER'} tokens as plain decoding"
        )
        share = describe_share(answer.tok_s, report.weight_bytes, report.read_bytes_s)
        if answer.mode == "ar" and share:
            yield share


def _format_drafts(answer: MeasuredAnswer) -> str:
    if answer.mode != "ar" and not answer.drafted:
        return "nothing drafted in time"
    return f"{answer.accepted} of {answer.drafted} accepted"


def _format_speed(tokens: int, milliseconds: float, unit: str = "") -> str:
    """Format tokens per second; mark the reference runtime's, which say nothing of a Mac."""
    if not tokens or not milliseconds:
        return ""
    what = "decoding" if tokens == 1 else f"{tokens} tokens a call"
    caveat = "; the reference runtime, not CoreML's speed" if "reference" in unit else ""
    return f" ({what}: {1e3 * tokens / milliseconds:.1f} tok/s{caveat})"


def format_probe(result: ProbeResult) -> Iterator[str]:
    """Yield the figures of one probe, a line each."""
    if result.failed:
        yield f"{result.kind} {result.compute_units}: no figure, {result.failed}"
        return
    match result.kind:
        case "functions":
            for cost in result.costs:
                text = f"{result.compute_units} {cost.name}: {cost.call_ms:.1f} ms on {cost.unit}"
                yield f"{text}{_format_speed(cost.tokens, cost.call_ms, cost.unit)}"
        case "device":
            yield (
                f"{result.compute_units}: best token of the reference on {result.same_best:.3f}, "
                f"worst logit {result.worst_logit:.3f}"
            )
        case "soak":
            yield (
                f"{result.calls} calls on {result.compute_unit}: best token of the first pass on "
                f"{result.same_best:.3f}, worst logit {result.worst_logit:.3f}, slowest "
                f"{result.slowest_ms:.1f} ms, memory {result.grown_mb:+.1f} MB"
            )
        case "injection":
            yield (
                f"injection of {result.tokens} tokens, {result.dtype}: "
                f"{result.milliseconds:.2f} ms, after {result.written_ms:.1f} ms "
                "of writing while the prompt is computed"
            )
        case "prefill":
            for prefill in result.prefills:
                yield (
                    f"prefill of {prefill.tokens} tokens: {prefill.mlx_ms:.0f} ms by MLX"
                    f"{_format_speed(prefill.tokens, prefill.mlx_ms)}; "
                    f"{prefill.coreml_ms:.0f} through the "
                    f"package on {result.compute_unit}"
                    f"{_format_speed(prefill.tokens, prefill.coreml_ms, result.compute_unit)}"
                )
        case _:
            yield f"{result.kind} {result.per_second:.1f} a second on {result.compute_unit}"
