"""Tables of the result for the terminal."""

from rich.table import Table

from launch.bench.headline import speeds_by_prompt, total_seconds
from launch.bench.result import BenchFile, ModeSummary, Overlap, Profile


def _empty(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for index, name in enumerate(columns):
        table.add_column(name, justify="right" if index else "left", no_wrap=True)
    return table


def speeds(result: BenchFile) -> Table:
    """Build a table with one row per category and mode: medians, and the speed-up over plain
    decoding.
    """
    table = _empty(
        "", "mode", "tok/s", "quartiles", "x ar", "95 %", "TTFT ms", "accept", "len", "hits",
        "eff.",
    )  # fmt: skip
    table.columns[1].justify = "left"
    # A truncated label would not identify the mode.
    table.columns[1].min_width = max(map(len, result.summary))
    groups = {**result.categories, "all": result.summary}
    for category, modes in groups.items():
        for mode, figures in modes.items():
            table.add_row(category, mode, *_cells(figures))
    return table


def _cells(s: ModeSummary) -> list[str]:
    return [
        f"{s.median:.1f}",
        f"{s.iqr.low:.1f}-{s.iqr.high:.1f}",
        _number(s.speedup_vs_ar),
        f"{s.ci95.low:.2f}-{s.ci95.high:.2f}" if s.ci95 else "-",
        f"{s.ttft_ms:.0f}",
        _number(s.acceptance_rate),
        _number(s.mean_acceptance_length),
        _number(s.hit_rate),
        _number(s.efficiency),
    ]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


LEGEND = (
    "x ar: median over prompts of the speed over plain decoding's, with its bootstrapped "
    "interval; accept: draft tokens accepted; len: tokens per round; hits: outcomes prepared in "
    "time; eff.: tok/s over Theorem 7's bound"
)


def prompts(result: BenchFile) -> Table:
    """Build a table with a row per prompt: its speed in each mode, and the total time of each
    mode.
    """
    modes = list(dict.fromkeys(run.mode for run in result.runs))
    table = _empty("tok/s by prompt", *modes)
    for name, speeds in speeds_by_prompt(result.runs).items():
        cells = (speeds.get(mode) for mode in modes)
        table.add_row(name, *("-" if cell is None else f"{cell:.1f}" for cell in cells))
    totals = total_seconds(result.runs)
    table.add_row("total time, s", *(f"{totals[mode]:.1f}" for mode in modes), style="bold")
    return table


def phases(result: BenchFile) -> Table:
    """Build a table of the median times of a round, a column per speculative mode."""
    modes = {name: s for name, s in result.summary.items() if s.acceptance_rate is not None}
    table = _empty("per round, median ms", *modes)
    for name in sorted({name for s in modes.values() for name in s.phase_ms}, key=_natural):
        cells = (s.phase_ms.get(name) for s in modes.values())
        table.add_row(name, *("-" if cell is None else f"{cell:.2f}" for cell in cells))
    return table


def drafting(result: BenchFile) -> Table:
    """Build a table of drafters, their features, and acceptance by lag."""
    modes = {name: s for name, s in result.summary.items() if s.acceptance_rate is not None}
    table = _empty("drafting", *modes)
    table.add_row("drafter", *(s.drafter or "-" for s in modes.values()))
    table.add_row("hidden under verification", *(_number(s.overlap_ratio) for s in modes.values()))
    table.add_row("share of messages", *(_number(s.ipc_share) for s in modes.values()))
    read = [s.state_bytes_per_round for s in modes.values()]
    table.add_row("states, kB a round", *(_number(b / 1e3 if b else None) for b in read))
    for lag in range(1, max((len(s.offered_by_lag) for s in modes.values()), default=0) + 1):
        cells = [_rate_at(s, lag) for s in modes.values()]
        if any(cell is not None for cell in cells):
            table.add_row(f"accepted at lag {lag}", *(_number(cell) for cell in cells))
    return table


def _rate_at(s: ModeSummary, lag: int) -> float | None:
    offered = s.offered_by_lag[lag - 1] if lag <= len(s.offered_by_lag) else 0
    return s.accepted_by_lag[lag - 1] / offered if offered else None


def _natural(name: str) -> tuple[str, int]:
    """Return a sort key that puts `verify_10` after `verify_2`."""
    stem, _, number = name.rpartition("_")
    return (stem, int(number)) if number.isdigit() else (name, -1)


def memory(result: BenchFile) -> str:
    """Describe the peak memory of each process, in a line."""
    peaks: dict[str, float] = {}
    for run in result.runs:
        for name, used in run.peak_memory_gb.items():
            peaks[name] = max(peaks.get(name, 0.0), used)
    return "peak memory, GB: " + ", ".join(f"{name} {used:.2f}" for name, used in peaks.items())


def profile(profiled: Profile) -> Table:
    """Build a table of the machine and the pair, and the expected speeds."""
    table = _empty("profile", "")
    table.add_row("T_v(m), ms", "  ".join(f"{m}: {ms:.1f}" for m, ms in profiled.verify_ms.items()))
    if profiled.draft_ms:
        cells = "  ".join(f"{b}: {ms:.2f}" for b, ms in profiled.draft_ms.items())
        table.add_row("T_d(B), ms", cells)
    table.add_row("a message, ms", f"{profiled.ipc_ms:.3f}")
    table.add_row("T_v during drafting", f"+{profiled.contention:.0%}")
    table.add_row("acceptance", f"{profiled.acceptance_rate:.2f}")
    if profiled.prediction is not None:
        p = profiled.prediction
        cells = "  ".join(f"{mode} {speed:.1f}" for mode, speed in p.tok_s.items())
        table.add_row("predicted tok/s", cells)
        knobs = (
            f", {p.num_draft_tokens} draft tokens, {p.branches} branches"
            if p.num_draft_tokens
            else ""
        )
        table.add_row("predicted best", f"{p.best_mode}{knobs}: {p.speedup_vs_ar:.2f} x ar")
    return table


def overlap(times: Overlap) -> Table:
    """Build a table that shows whether two compute units really run concurrently."""
    table = _empty("overlap", "ms")
    table.add_row(times.first, f"{times.first_ms:.0f}")
    table.add_row(times.second, f"{times.second_ms:.0f}")
    table.add_row("in turn", f"{times.first_ms + times.second_ms:.0f}")
    table.add_row("together", f"{times.together_ms:.0f}")
    table.add_row("speed-up, at best 2", f"{times.speed_up:.2f}")
    table.add_row("of the shorter, hidden", f"{times.efficiency:.2f}")
    return table
