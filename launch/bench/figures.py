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
from typing import Any

import msgspec

from launch.bench.plots import DRAFT, draw_svg, origin_colour
from launch.bench.result import BenchFile, BenchRun, ModeSummary
from protocol.errors import UsageError
from protocol.messages import TraceEvent

_NAMES = {
    "mlx-lm": "mlx-lm, all cores",
    "mlx-lm-draft": "mlx-lm with a draft model",
    "ar": "plain decoding",
    "sd": "speculative (sd)",
    "ssd": "ssd",
}
_COLOURS = {
    "mlx-lm": "#c3cad2", "mlx-lm-draft": "#a8b1bc", "ar": "#8b96a3", "sd": "#e0a030",
    "ssd": "#2a7f62",
}  # fmt: skip
_BACKGROUND = "#ffffff"
_ROUNDS = 3
_CAPTION = (
    "green: the draft was ready when the verification before ended; "
    "blue: one depth of the tree for the next round"
)


def speed_figure(result: BenchFile) -> str:
    """Draw tokens per second by kind of prompt and mode."""
    groups = {**result.categories, "all": result.summary}
    modes = [mode for mode in _NAMES if mode in result.summary]

    def draw(axes: Any) -> None:
        width = 0.84 / len(modes)
        for number, mode in enumerate(modes):
            for place, figures in enumerate(groups.values()):
                _bar(axes, place + number * width, width, figures.get(mode), _COLOURS[mode])
            axes.bar(0, 0, color=_COLOURS[mode], label=_NAMES[mode])
        axes.set_xticks([i + 0.42 - width / 2 for i in range(len(groups))], list(groups))
        axes.set_xlim(-0.1 - width / 2, len(groups) - 0.1)
        axes.set_ylabel("tokens per second")
        axes.set_title(_describe(result), fontsize=8, loc="right", color="#555", pad=30)
        axes.legend(ncols=5, frameon=False, fontsize=8, loc="lower left", bbox_to_anchor=(0, 1))

    return draw_svg(9.0, 3.6, draw, background=_BACKGROUND)


def _bar(axes: Any, left: float, width: float, figures: ModeSummary | None, colour: str) -> None:
    if figures is None:
        return
    axes.bar(left, figures.median, width * 0.92, color=colour)
    label = f"{figures.median:.0f}" if figures.median >= 10 else f"{figures.median:.1f}"
    axes.text(left, figures.median, label, ha="center", va="bottom", fontsize=7)


def _describe(result: BenchFile) -> str:
    pair = f"{Path(result.config.model).name}, {result.hardware.processor.strip()}"
    return f"{pair}, {result.created[:10]}"


def timeline_figure(runs: Sequence[BenchRun]) -> str:
    """Draw a few rounds of one answer: drafting below the verification that hides it.

    Raises:
        UsageError: no run has rounds whose draft was ready when the verification ended.
    """
    pair = next((rounds for run in runs if (rounds := _rounds_with_hits(run))), None)
    if pair is None:
        raise UsageError(
            "no run of the file has two rounds on a hit in a row: measure more prompts"
        )
    verified, drafted = pair
    start = verified[0].start_us

    def draw(axes: Any) -> None:
        for event in verified:
            _piece(axes, 1, event, start, origin_colour(event))
        for event in drafted:
            _piece(axes, 0, event, start, DRAFT)
        axes.set_yticks([0, 1], ["drafter", "target"])
        axes.set_xlabel("milliseconds")
        axes.set_title(_CAPTION, fontsize=8, loc="left", color="#555")
        axes.set_ylim(-0.5, 1.6)

    return draw_svg(9.0, 2.2, draw, background=_BACKGROUND)


def _piece(axes: Any, row: int, event: TraceEvent, start_us: float, colour: str) -> None:
    left, width = (event.start_us - start_us) / 1e3, event.duration_us / 1e3
    axes.barh(row, width, 0.6, left, color=colour, edgecolor="white", linewidth=1)
    text = event.name  # "depth N"
    if event.name == "verify":
        count = int(event.details["m"])
        accepted = f", {event.details['accepted']} of {count - 1} drafts accepted"
        text = f"verify {count} tokens{accepted if count > 1 else ''}"
    axes.text(left + width / 2, row, text, ha="center", va="center", fontsize=7, color="white")


def _rounds_with_hits(run: BenchRun) -> tuple[list[TraceEvent], list[TraceEvent]] | None:
    """Return consecutive verifications, all but the first after a hit, and their drafts."""
    verified = [event for event in run.timeline if event.name == "verify"]
    for at in range(1, len(verified) - _ROUNDS + 1):
        rounds = verified[at : at + _ROUNDS]
        drafts = [
            event
            for event in run.timeline
            if event.name.startswith("depth ")
            and rounds[0].start_us <= event.start_us < rounds[-1].start_us + rounds[-1].duration_us
        ]
        on_hits = all(event.details.get("chain") == "hit" for event in rounds[1:])
        progress = sum(int(event.details["accepted"]) for event in rounds)
        if on_hits and progress >= _ROUNDS and _each_has_drafts(rounds, drafts):
            return rounds, drafts
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
            "speed.svg": speed_figure(result),
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
