"""The headline of a benchmark: ssd compared with the best alternative, by kind of prompt."""

from collections.abc import Iterator, Sequence
from statistics import median

from launch.bench.bandwidth import describe_share
from launch.bench.result import BenchFile, BenchRun

_OURS = "ssd"


def headline(result: BenchFile) -> list[str]:
    """Return a sentence for each kind of prompt, including losses; empty without a comparison.

    The ratio is the median over prompts of each answer's ratio to the other mode with the highest
    median speed: mlx-lm with all cores, plain decoding, or another way to speculate.
    """
    return [
        sentence
        for temperature in dict.fromkeys(run.temperature for run in result.runs)
        for name, runs in _groups([r for r in result.runs if r.temperature == temperature])
        if (sentence := _compare(name, runs))
    ]


def describe_reading(result: BenchFile) -> str:
    """Describe plain decoding's share of the memory bandwidth; empty if unknown."""
    plain = [r.decode_tps for r in result.runs if r.mode == "ar" and not r.temperature]
    if result.reading is None or not plain:
        return ""
    reading = result.reading
    return describe_share(median(plain), reading.weight_bytes, reading.read_bytes_s)


def total_seconds(runs: Sequence[BenchRun]) -> dict[str, float]:
    """Return the seconds of all answers by mode, prompts included."""
    totals: dict[str, float] = {}
    for run in runs:
        totals[run.mode] = totals.get(run.mode, 0.0) + run.ttft_ms / 1e3 + run.decode_s
    return totals


def speeds_by_prompt(runs: Sequence[BenchRun]) -> dict[str, dict[str, float]]:
    """Return prompt -> mode -> tokens per second, the median over repeats and temperatures."""
    names = dict.fromkeys((run.prompt_id, run.category) for run in runs)
    modes = dict.fromkeys(run.mode for run in runs)
    by_label: dict[str, dict[str, float]] = {}
    for prompt, category in names:
        runs_of_prompt = [
            run for run in runs if (run.prompt_id, run.category) == (prompt, category)
        ]
        speeds = {
            mode: [run.decode_tps for run in runs_of_prompt if run.mode == mode] for mode in modes
        }
        label = str(prompt) if str(prompt).startswith(category) else f"{category} {prompt}"
        by_label[label] = {mode: median(values) for mode, values in speeds.items() if values}
    return by_label


def _groups(runs: Sequence[BenchRun]) -> Iterator[tuple[str, Sequence[BenchRun]]]:
    categories = dict.fromkeys(run.category for run in runs)
    if len(categories) > 1:
        for category in categories:
            yield category or "other", [run for run in runs if run.category == category]
    yield "all prompts", runs


def _compare(name: str, runs: Sequence[BenchRun]) -> str:
    speeds = {
        mode: median(run.decode_tps for run in runs if run.mode == mode)
        for mode in dict.fromkeys(run.mode for run in runs)
    }
    ours = {mode: speed for mode, speed in speeds.items() if mode.split(":")[0] == _OURS}
    others = {mode: speed for mode, speed in speeds.items() if mode not in ours}
    if not ours or not others:
        return ""
    best, other = max(ours, key=ours.__getitem__), max(others, key=others.__getitem__)
    ratio = _ratio(runs, best, other)
    verdict = f"{ratio:.2f} times" if ratio >= 1.0 else f"SLOWER, {ratio:.2f} times"
    temperature = f" at T={runs[0].temperature:g}" if runs[0].temperature else ""
    return (
        f"{name}{temperature}: {best} {ours[best]:.1f} tok/s, {verdict} the best of the others "
        f"({other}, {others[other]:.1f})"
    )


def _ratio(runs: Sequence[BenchRun], mine: str, other: str) -> float:
    """Return the median over the prompts that both answered."""
    by_mode = {
        mode: {
            prompt: median(r.decode_tps for r in runs if (r.mode, r.prompt_id) == (mode, prompt))
            for prompt in dict.fromkeys(run.prompt_id for run in runs if run.mode == mode)
        }
        for mode in (mine, other)
    }
    ratios = [
        speed / by_mode[other][prompt]
        for prompt, speed in by_mode[mine].items()
        if by_mode[other].get(prompt)
    ]
    return median(ratios) if ratios else 0.0
