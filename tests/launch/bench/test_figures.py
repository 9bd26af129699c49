"""The README's figures: from a benchmark's file to SVG."""

from pathlib import Path

import msgspec
import pytest

from launch.bench.figures import main, timeline_figure
from launch.bench.result import (
    BenchFile,
    BenchRun,
    Checks,
    Config,
    Hardware,
    Interval,
    ModeSummary,
)
from protocol.errors import UsageError
from protocol.messages import TraceEvent


def event(name: str, start_ms: int, ms: int, **details: int | str) -> TraceEvent:
    track = "verifier" if name == "verify" else "drafter"
    return TraceEvent(
        track=track, name=name, start_us=1e3 * start_ms, duration_us=1e3 * ms, details=details
    )


def run(*chains: str) -> BenchRun:
    """An answer whose rounds take 100 ms, each with one depth of drafting under it."""
    timeline = [
        event("verify", 100 * n, 99, m=3, accepted=2, chain=chain) for n, chain in enumerate(chains)
    ] + [event("depth 1", 100 * n + 10, 50, branches=4) for n in range(len(chains))]
    return BenchRun(
        prompt_id=1, category="code", mode="ssd", repeat=0, temperature=0.0, prompt_tokens=5,
        tokens=9, ttft_ms=1.0, decode_tps=20.0, decode_s=1.0, output_sha256="", timeline=timeline,
    )  # fmt: skip


def figures(tok_s: float) -> ModeSummary:
    spread = Interval(tok_s, tok_s)
    return ModeSummary(runs=1, median=tok_s, iqr=spread, speedup_vs_ar=None, ci95=None, ttft_ms=1.0)


def file(*runs: BenchRun) -> BenchFile:
    return BenchFile(
        tool_version="0",
        created="2026-01-02T03:04:05",
        hardware=Hardware(system="here", processor="a chip", cores=2, memory_gb=8.0),
        config=Config(
            model="/models/a-target", draft_model="", draft_backend="mlx", mode=[], sampling=[],
            max_tokens=9, repeats=1, prompts="",
        ),
        runs=list(runs),
        summary={"mlx-lm": figures(22.0), "ar": figures(17.0), "ssd": figures(31.0)},
        categories={"chat": {"ssd": figures(25.0)}, "code": {"ssd": figures(37.0)}},
        checks=Checks(lossless=True, compared=1, rounding_ties=0),
    )  # fmt: skip


def test_both_figures_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Speeds with their modes and kinds of prompt, and rounds with what they verified."""
    source = tmp_path / "runs.json"
    source.write_bytes(msgspec.json.encode(file(run("target", "miss", "hit", "hit"))))
    assert main([str(source), str(tmp_path / "out")]) == 0
    speed = (tmp_path / "out" / "speed.svg").read_text()
    words = (">31<", ">22<", ">37<", "ar", "mlx-lm", "tokens per second")
    assert [word for word in words if word not in speed] == []
    timeline = (tmp_path / "out" / "timeline.svg").read_text()
    assert timeline.count(">2/2<") == 3
    assert capsys.readouterr().out.count(".svg") == 2


def test_without_hits_there_is_no_timeline() -> None:
    """The picture shows drafting that was hidden, or nothing."""
    with pytest.raises(UsageError, match="measure more prompts"):
        timeline_figure([run("target", "miss", "miss", "hit", "miss")])


def test_what_is_no_file_of_a_benchmark(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One sentence and the exit code of a usage error."""
    (tmp_path / "runs.json").write_text("{}")
    assert main([str(tmp_path / "runs.json"), str(tmp_path)]) == UsageError.exit_code
    assert main([]) == UsageError.exit_code
    assert capsys.readouterr().err.count("\n") == 2
