"""The README's figures, drawn from the JSON file of a benchmark.

    ssd bench --modes mlx-lm,mlx-lm-draft,ar,sd,ssd --json runs.json
    python -m launch.bench.figures runs.json docs/figures

`speed.svg`: tokens per second by kind of prompt and mode. `timeline.svg`: a few rounds of one
answer, the target above and the drafter below.
"""

import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import msgspec

from launch.bench.plots import plot_speeds, timeline
from launch.bench.result import BenchFile, BenchRun
from protocol.errors import UsageError
from protocol.messages import TraceEvent

_BACKGROUND = "#ffffff"
_ROUNDS = 3


def timeline_figure(runs: Sequence[BenchRun]) -> str:
    """Draw a few rounds of one answer: drafting below the verification that hides it.

    Raises:
        UsageError: no run has rounds whose draft was ready when the verification ended.
    """
    for run in runs:
        if (first := _find_rounds_with_hits(run)) is not None:
            return timeline(run, first, _ROUNDS, _BACKGROUND)
    raise UsageError("no run of the file has two rounds on a hit in a row: measure more prompts")


def _find_rounds_with_hits(run: BenchRun) -> int | None:
    """Return the first of some verifications, all but it after a hit, with drafts under each."""
    verified = [event for event in run.timeline if event.name == "verify"]
    drafts = [event for event in run.timeline if event.name.startswith("depth ")]
    for at in range(1, len(verified) - _ROUNDS + 1):
        rounds = verified[at : at + _ROUNDS]
        on_hits = all(event.details.get("chain") == "hit" for event in rounds[1:])
        progress = sum(int(event.details["accepted"]) for event in rounds)
        if on_hits and progress >= _ROUNDS and _each_has_drafts(rounds, drafts):
            return at
    return None


def _each_has_drafts(rounds: Sequence[TraceEvent], drafts: Sequence[TraceEvent]) -> bool:
    return all(
        any(event.start_us <= draft.start_us < next_event.start_us for draft in drafts)
        for event, next_event in pairwise(rounds)
    )


def main(arguments: Sequence[str]) -> int:
    """Draw both figures; return the exit code."""
    if len(arguments) != 2:
        print("usage: python -m launch.bench.figures RUNS.json FOLDER", file=sys.stderr)
        return UsageError.exit_code
    source, folder = map(Path, arguments)
    try:
        result = msgspec.json.decode(source.read_bytes(), type=BenchFile)
        figures = {
            "speed.svg": plot_speeds(result, relative=False, background=_BACKGROUND),
            "timeline.svg": timeline_figure([run for run in result.runs if run.timeline]),
        }
    except (OSError, msgspec.DecodeError, UsageError) as error:
        print(f"error: {source}: {error}", file=sys.stderr)
        return UsageError.exit_code
    folder.mkdir(parents=True, exist_ok=True)
    for name, svg in figures.items():
        (folder / name).write_text(svg, encoding="utf-8")
        print(folder / name)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
