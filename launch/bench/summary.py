"""Aggregates runs: medians with their spread, pooled counts, and the bound."""

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from statistics import median, quantiles
from typing import Any

from launch.bench.result import BenchRun, Interval, ModeSummary
from orchestrator.simulation.bound import Rounds, upper_bound_tok_s
from protocol.messages import Statistics

PLAIN = "ar"
_RESAMPLES = 2000
_FEWEST = 3
"""Fewest prompts for which an interval is meaningful."""


def keys(runs: Iterable[BenchRun]) -> dict[str, tuple[str, float]]:
    """Map each name in the summary to its (mode, temperature), in the order of the runs."""
    pairs = list(dict.fromkeys((run.mode, run.temperature) for run in runs))
    several = len({temperature for _, temperature in pairs}) > 1
    return {
        f"{mode}@{temperature:g}" if several else mode: (mode, temperature)
        for mode, temperature in pairs
    }


def summary(runs: Sequence[BenchRun]) -> dict[str, ModeSummary]:
    """Summarise all these runs per mode and temperature."""
    return {
        key: summarise(
            [run for run in runs if (run.mode, run.temperature) == pair],
            [run for run in runs if (run.mode, run.temperature) == (PLAIN, pair[1])],
        )
        for key, pair in keys(runs).items()
    }


def categories(runs: Sequence[BenchRun]) -> dict[str, dict[str, ModeSummary]]:
    """Summarise the runs per category; empty if there is only one."""
    names = list(dict.fromkeys(run.category for run in runs))
    if len(names) < 2:
        return {}
    return {name: summary([run for run in runs if run.category == name]) for name in names}


def summarise(runs: Sequence[BenchRun], plain: Sequence[BenchRun]) -> ModeSummary:
    """Summarise the runs of one mode; `plain` are the runs of plain decoding, possibly the same."""
    speeds = [run.decode_tps for run in runs]
    low, _, high = quantiles(speeds, n=4) if len(speeds) > 1 else (speeds[0],) * 3
    ratios = _ratios(runs, plain)
    answers = [run.statistics for run in runs if run.statistics is not None]
    rest: dict[str, Any] = _speculation(runs, answers) if any(s.drafted for s in answers) else {}
    return ModeSummary(
        runs=len(runs),
        median=median(speeds),
        iqr=Interval(low, high),
        speedup_vs_ar=median(ratios) if ratios else None,
        ci95=bootstrap(ratios) if len(ratios) >= _FEWEST else None,
        ttft_ms=median(run.ttft_ms for run in runs),
        phase_ms=_phases(answers),
        **rest,
    )


def _ratios(runs: Sequence[BenchRun], plain: Sequence[BenchRun]) -> list[float]:
    """Return the speed relative to plain decoding per prompt; medians over repeats."""
    base, mine = _by_prompt(plain), _by_prompt(runs)
    return [mine[prompt] / base[prompt] for prompt in mine if base.get(prompt)]


def _by_prompt(runs: Sequence[BenchRun]) -> dict[object, float]:
    prompts = dict.fromkeys(run.prompt_id for run in runs)
    return {
        prompt: median(run.decode_tps for run in runs if run.prompt_id == prompt)
        for prompt in prompts
    }


def bootstrap(values: Sequence[float]) -> Interval:
    """Return the 95 % interval of the median, by deterministic resampling."""
    chance = random.Random(0)  # noqa: S311  # statistics, no secrets
    size = len(values)
    medians = sorted(median(chance.choices(values, k=size)) for _ in range(_RESAMPLES))
    return Interval(medians[round(0.025 * _RESAMPLES)], medians[round(0.975 * _RESAMPLES) - 1])


def _speculation(runs: Sequence[BenchRun], answers: Sequence[Statistics]) -> dict[str, Any]:
    """Return the fields that only speculation has; counts are pooled over all runs."""
    drafted, accepted = sum(s.drafted for s in answers), sum(s.accepted for s in answers)
    rounds = sum(s.rounds for s in answers)
    hits, misses = sum(s.cache_hits for s in answers), sum(s.cache_misses for s in answers)
    looked_up, hits_by_origin, ranks = Counter[str](), Counter[str](), Counter[int]()
    for s in answers:
        looked_up.update({kind: figures.cache_lookups for kind, figures in s.by_origin.items()})
        hits_by_origin.update({kind: figures.cache_hits for kind, figures in s.by_origin.items()})
        ranks.update(dict(enumerate(s.hits_by_rank)))
    lookups = looked_up.total()
    decoded = sum(run.tokens - 1 for run in runs)
    seconds = sum(run.decode_s for run in runs)
    waited_ms = sum(s.cache_hits * s.phase_ms.get("idle_hit", 0.0) for s in answers)
    return {
        "acceptance_rate": accepted / drafted,
        "mean_acceptance_length": 1.0 + accepted / rounds,
        "per_position": _per_position(answers),
        "drafter": next((s.drafter for s in answers if s.drafter), ""),
        "state_bytes_per_round": sum(s.state_bytes for s in answers) / rounds or None,
        "offered_by_lag": _add([s.offered_by_lag for s in answers]),
        "accepted_by_lag": _add([s.accepted_by_lag for s in answers]),
        "hit_rate": hits / (hits + misses) if hits + misses else None,
        "hit_rate_after": {kind: hits_by_origin[kind] / n for kind, n in looked_up.items() if n},
        "hits_within": [
            sum(ranks[i] for i in range(width)) / lookups for width in range(1, 1 + len(ranks))
        ]
        if lookups
        else [],
        "overlap_ratio": _mean(s.overlap_ratio for s in answers) if lookups else None,
        "ipc_share": waited_ms / (1e3 * seconds) if hits and seconds else None,
        "plain_rounds": sum(s.plain_rounds for s in answers) / rounds,
        **_bounds(answers, decoded / seconds if seconds else 0.0),
    }


def _bounds(answers: Sequence[Statistics], tok_s: float) -> dict[str, float | None]:
    """Return Theorem 7 for the measured hits, lengths and verification times of these answers."""
    hit, miss = _add_rounds(answers)
    waited_ms = sum(s.draft_wait_ms for s in answers)
    bound = upper_bound_tok_s(hit, miss, waited_ms)
    return {"bound_tok_s": bound or None, "efficiency": tok_s / bound if bound else None}


def _add_rounds(answers: Sequence[Statistics]) -> tuple[Rounds, Rounds]:
    """Sum the rounds whose draft was ready, and all others."""
    hit, miss = Rounds(), Rounds()
    for s in answers:
        for origin, kind in s.by_origin.items():
            into = hit if origin == "hit" else miss
            into.count += kind.rounds
            into.tokens += kind.accepted + kind.rounds
            into.verify_ms += kind.verify_ms
    return hit, miss


def _per_position(answers: Sequence[Statistics]) -> list[float]:
    """Return means over the answers that offered the position, weighted by rounds."""
    longest = max(len(s.per_position) for s in answers)
    rates = []
    for position in range(longest):
        with_it = [s for s in answers if len(s.per_position) > position]
        weight = sum(s.rounds for s in with_it)
        rates.append(sum(s.per_position[position] * s.rounds for s in with_it) / weight)
    return rates


def _add(counts: Sequence[Sequence[int]]) -> list[int]:
    """Sum lists of any lengths element by element."""
    return [sum(column) for column in zip_longest(*counts, fillvalue=0)]


def _phases(answers: Sequence[Statistics]) -> dict[str, float]:
    names = dict.fromkeys(name for s in answers for name in s.phase_ms)
    return {name: median(s.phase_ms[name] for s in answers if name in s.phase_ms) for name in names}


def _mean(values: Iterable[float]) -> float:
    samples = list(values)
    return sum(samples) / len(samples)
