"""The plots of the report, as SVG."""

import io
from collections.abc import Callable
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from launch.bench.result import BenchFile, BenchRun, ModeSummary, Profile
from protocol.messages import TraceEvent

# Text remains text, so that it can be searched and read aloud; ids are reproducible.
mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "ssd", "font.size": 10})

_COLOURS = (
    "#9aa5b1", "#e0a030", "#2a7f62", "#3f6fb5", "#9b59b6", "#c0504d", "#17becf", "#8c6d31",
    "#e377c2", "#7fb3a0", "#5c6b73", "#bcbd22",
)  # fmt: skip
_HIT, _MISS, _PLAIN = "#2a7f62", "#e0a030", "#9aa5b1"
_DRAFT = "#3f6fb5"
_LOOKUP = "#b86fb0"
_ROUNDS_SHOWN = 14


def draw_svg(
    width: float,
    height: float,
    draw: Callable[[Any], None],
    panels: int = 1,
    background: str = "none",
) -> str:
    """Draw a plot as SVG, `width` x `height` inches; `draw` gets its axes."""
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(1, panels)
    for panel in axes if panels > 1 else [axes]:
        panel.set_facecolor("none")
        panel.spines[["top", "right"]].set_visible(False)
    draw(axes)
    text = io.StringIO()
    figure.savefig(
        text, format="svg", facecolor=background, metadata={"Date": None, "Creator": None}
    )
    return text.getvalue()[text.getvalue().index("<svg") :]


def colours(result: BenchFile) -> dict[str, str]:
    """Return one colour per mode, the same in all plots and at all temperatures."""
    names = list(dict.fromkeys(mode.partition("@")[0] for mode in result.summary))
    return {
        mode: _COLOURS[names.index(mode.partition("@")[0]) % len(_COLOURS)]
        for mode in result.summary
    }


def speeds(result: BenchFile) -> str:
    """Plot speed relative to plain decoding by category and mode; a plot per temperature."""
    temperatures = dict.fromkeys(mode.partition("@")[2] for mode in result.summary)
    compared = any(s.speedup_vs_ar for s in result.summary.values())
    return "".join(plot_speeds(result, t, relative=compared) for t in temperatures)


def plot_speeds(
    result: BenchFile, temperature: str = "", *, relative: bool, background: str = "none"
) -> str:
    """Plot speeds with intervals: in tok/s, or `relative` to plain decoding."""
    modes = [mode for mode in result.summary if mode.partition("@")[2] == temperature]
    groups = {**result.categories, "all": result.summary}
    paint = colours(result)

    def draw(axes: Any) -> None:
        width = 0.85 / len(modes)
        for at, mode in enumerate(modes):
            for place, figures in enumerate(groups.values()):
                bar = (place + at * width, width)
                _bar(axes, bar, figures.get(mode), paint[mode], relative=relative)
            axes.bar(0, 0, color=paint[mode], label=mode)
        axes.set_xticks([i + 0.425 - width / 2 for i in range(len(groups))], list(groups))
        axes.set_ylabel("times plain decoding" if relative else "tokens per second")
        if relative:
            axes.axhline(1.0, color="#444", linewidth=0.8, linestyle="--")
        axes.legend(ncols=4, frameon=False, fontsize=9, loc="lower left", bbox_to_anchor=(0, 1))

    return draw_svg(9.5, 4.2, draw, background=background)


def _bar(
    axes: Any,
    place: tuple[float, float],
    s: ModeSummary | None,
    colour: str,
    *,
    relative: bool,
) -> None:
    """Draw one mode's bar at (left, width): its speed-up if there is one, else its tok/s."""
    if s is None:
        return
    x, width = place
    relative = relative and s.speedup_vs_ar is not None
    height = s.speedup_vs_ar if relative and s.speedup_vs_ar is not None else s.median
    spread = s.ci95 if relative else s.iqr
    axes.bar(x, height, width * 0.92, color=colour)
    if spread is not None and spread.high > spread.low:
        below, above = max(0.0, height - spread.low), max(0.0, spread.high - height)
        axes.errorbar(x, height, [[below], [above]], color="#222", capsize=2, linewidth=1)
    text = f"{height:.2f}" if relative else f"{height:.0f}"
    axes.text(x, height, text, ha="center", va="bottom", fontsize=7)


def guesses(result: BenchFile) -> str:
    """Plot acceptance by position, and hits by the number of candidates."""
    modes = {name: s for name, s in result.summary.items() if s.per_position}
    paint = colours(result)

    def draw(axes: Any) -> None:
        left, right = axes
        for name, s in modes.items():
            places = range(1, len(s.per_position) + 1)
            style = "o-" if name.endswith("@0") or "@" not in name else "o--"
            left.plot(places, s.per_position, style, color=paint[name], label=name, markersize=4)
            if s.hits_within:
                counts = range(1, len(s.hits_within) + 1)
                right.plot(counts, s.hits_within, style, color=paint[name], markersize=4)
        for panel in axes:
            panel.xaxis.get_major_locator().set_params(integer=True)
        left.set(xlabel="position in the draft", ylabel="share accepted", ylim=(0, 1))
        right.set(xlabel="candidates prepared (F)", ylabel="outcome was among them", ylim=(0, 1))
        left.legend(frameon=False, fontsize=9)

    return draw_svg(9.5, 3.4, draw, panels=2)


def costs(profile: Profile) -> str:
    """Plot T_v(m) and T_d(B)."""

    def draw(axes: Any) -> None:
        pairs = (
            (axes[0], profile.verify_ms, "tokens verified at once (m)", "target, ms", _HIT),
            (axes[1], profile.draft_ms, "branches drafted at once (B)", "drafter, ms", _DRAFT),
        )
        for panel, curve, across, up, colour in pairs:
            counts = [int(count) for count in curve]
            panel.plot(counts, list(curve.values()), "o-", color=colour, markersize=4)
            panel.set(xlabel=across, ylabel=up)
            panel.set_ylim(bottom=0)

    return draw_svg(9.5, 3.0, draw, panels=2)


def timeline(
    run: BenchRun, first: int = 1, rounds: int = _ROUNDS_SHOWN, background: str = "none"
) -> str:
    """Plot the events of each process in some rounds of one answer, from the `first` on."""
    work = run.timeline
    verified = [slice_ for slice_ in work if slice_.name == "verify"][first : first + rounds]
    if not verified:
        return ""
    start, end = verified[0].start_us, verified[-1].start_us + verified[-1].duration_us
    drafted = [s for s in work if s.name.startswith("depth ") and start <= s.start_us < end]

    def draw(axes: Any) -> None:
        for slice_ in verified:
            left, width = (slice_.start_us - start) / 1e3, slice_.duration_us / 1e3
            axes.barh(1, width, 0.6, left, color=_origin_colour(slice_), edgecolor="w")
            shown = f"{slice_.details['accepted']}/{int(slice_.details['m']) - 1}"
            middle = left + width / 2
            axes.text(middle, 1, shown, ha="center", va="center", fontsize=8, color="w")
        for slice_ in drafted:
            left, width = (slice_.start_us - start) / 1e3, slice_.duration_us / 1e3
            axes.barh(0, width, 0.6, left, color=_DRAFT, edgecolor="w")
        axes.set_yticks([0, 1], ["drafter", "target"])
        axes.set_xlabel("milliseconds")
        keys = {
            "after a hit": _HIT,
            "after a miss": _MISS,
            "looked up": _LOOKUP,
            "without a draft": _PLAIN,
        }
        for name, colour in {**keys, "one depth of the tree": _DRAFT}.items():
            axes.barh(1, 0, color=colour, label=name)
        axes.legend(ncols=4, frameon=False, fontsize=9, loc="lower left", bbox_to_anchor=(0, 1))

    return draw_svg(9.5, 2.4, draw, background=background)


def _origin_colour(verified: TraceEvent) -> str:
    """Return the colour of a verification by the origin of its chain."""
    colours = {"hit": _HIT, "miss": _MISS, "lookup": _LOOKUP}
    return colours.get(str(verified.details["chain"]), _PLAIN)


def predictions(result: BenchFile) -> str:
    """Plot predicted against measured tok/s, for the modes that have both."""
    expected = result.profile.prediction if result.profile else None
    # The prediction is for greedy decoding.
    greedy = {mode.removesuffix("@0"): s for mode, s in result.summary.items()}
    both = {
        mode: (expected.tok_s[mode], s.median)
        for mode, s in greedy.items()
        if expected is not None and mode in expected.tok_s
    }
    if not both:
        return ""

    def draw(axes: Any) -> None:
        for side, name, colour in ((0, "predicted", "#b8c4d6"), (1, "measured", _DRAFT)):
            heights = [pair[side] for pair in both.values()]
            places = [i + 0.36 * side for i in range(len(both))]
            axes.bar(places, heights, 0.34, color=colour, label=name)
            for x, height in zip(places, heights, strict=True):
                axes.text(x, height, f"{height:.1f}", ha="center", va="bottom", fontsize=8)
        axes.set_xticks([i + 0.18 for i in range(len(both))], list(both))
        axes.set_ylabel("tokens per second")
        axes.legend(frameon=False, fontsize=9, ncols=2, loc="lower left", bbox_to_anchor=(0, 1))

    return draw_svg(6.0, 3.0, draw)
