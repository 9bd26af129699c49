"""Simulation scenarios from files, presets and flags, and tables of their results."""

import importlib.resources
import tomllib
from pathlib import Path
from typing import Any

import msgspec
from rich.table import Table

from orchestrator.simulation.run import Run
from orchestrator.simulation.scenario import AcceptanceModel, Device, Scenario
from orchestrator.simulation.sweep import Comparison
from protocol.errors import UsageError
from protocol.validation import describe

HEADLINE = "SIMULATION: models of a device and of a pair of models, nothing here was measured"

_DEVICES = Path(str(importlib.resources.files("launch.bench"))) / "devices"


def presets() -> list[str]:
    """Return the names of the devices described in `launch/bench/devices`."""
    return sorted(path.stem for path in _DEVICES.glob("*.toml"))


def scenario_of(file: Path | None, preset: str | None, flags: dict[str, Any]) -> Scenario:
    """Return the scenario to simulate: flags override the file or preset.

    Raises:
        UsageError: a file cannot be read, a key is unknown, a value impossible, or T_v, T_d or
            alpha is missing.
    """
    if file is not None and preset is not None:
        raise UsageError("give a file or a --preset, not both")
    path = file or (_DEVICES / f"{preset}.toml" if preset else None)
    values = _parse_toml(path) if path else {}
    if path:
        values.setdefault("name", path.stem)
    for section, kind in (("device", Device), ("acceptance", AcceptanceModel)):
        fields = values.setdefault(section, {})
        if isinstance(fields, dict):
            fields |= {name: flags[name] for name in kind.__struct_fields__ if name in flags}
    values |= {name: flags[name] for name in Scenario.__struct_fields__ if name in flags}
    try:
        return msgspec.convert(values, Scenario)
    except msgspec.ValidationError as error:
        if path:
            raise UsageError(f"{path}: {describe(error)}") from error
        hint = "give --t-verify, --t-draft and --alpha, a file, or --preset"
        raise UsageError(f"{describe(error)} ({hint})") from error


def _parse_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{str(path)!r} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"{str(path)!r} cannot be read: {error}") from error


def table(runs: list[Run], plain: Run) -> Table:
    """Build a table with one row per strategy."""
    result = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    columns = ("", "tok/s", "x ar", "bound", "eff.", "hits", "accepted", "nodes", "len",
               "hidden", "plain")  # fmt: skip
    for name in columns:
        result.add_column(name, justify="right" if name else "left")
    for run in runs:
        s = run.statistics
        looked_up = s.cache_hits + s.cache_misses
        result.add_row(
            run.strategy.label,
            f"{run.tok_s:.1f}",
            f"{run.tok_s / plain.tok_s:.2f}",
            f"{run.bound_tok_s:.1f}",
            f"{run.efficiency:.2f}",
            f"{s.hit_rate:.2f}" if looked_up else "-",
            f"{s.acceptance_rate:.2f}" if s.drafted else "-",
            f"{s.drafted / s.rounds:.1f}",
            f"{s.mean_acceptance_length:.2f}",
            f"{s.overlap_ratio:.2f}" if looked_up else "-",
            f"{s.plain_rounds / s.rounds:.2f}",
        )
    return result


LEGEND = (
    "bound: Theorem 7 with this run's hits, lengths and times; eff.: tok/s over it; "
    "nodes: draft tokens verified per round; len: tokens per "
    "round; hidden: drafting under verification; plain: share of rounds without a draft"
)


def grid(comparison: Comparison) -> Table:
    """Build a table of the fixed pairs' tok/s: a row per K, a column per B."""
    runs = {(r.strategy.num_draft_tokens, r.strategy.branches): r.tok_s for r in comparison.fixed}
    budgets = sorted({budget for _, budget in runs})
    best = max(runs.values())
    result = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    result.add_column("tok/s, fixed")
    for budget in budgets:
        result.add_column(f"B={budget}", justify="right")
    for num_draft_tokens in sorted({num_draft_tokens for num_draft_tokens, _ in runs}):
        speeds = [runs[num_draft_tokens, budget] for budget in budgets]
        cells = [f"{speed:.1f}{'*' if speed == best else ' '}" for speed in speeds]
        result.add_row(f"K={num_draft_tokens}", *cells)
    return result


def verdict(comparison: Comparison) -> str:
    """Compare the planner with the best fixed pair, in a sentence."""
    best = comparison.best_fixed
    sentence = (
        f"adaptive {comparison.adaptive.tok_s:.1f} tok/s, {comparison.against_plain:.2f} x ar"
    )
    if best is None:
        return f"{sentence}."
    return (
        f"{sentence}; best fixed pair (*) K={best.strategy.num_draft_tokens} "
        f"B={best.strategy.branches} {best.tok_s:.1f} tok/s: adaptive is "
        f"{comparison.against_fixed:.2f} of it."
    )


def as_json(scenario: Scenario, runs: list[Run], comparison: Comparison) -> bytes:
    """Return all results as JSON."""
    best = comparison.best_fixed
    return msgspec.json.encode(
        {
            "simulated": True,
            "scenario": scenario,
            "runs": [{"label": run.strategy.label, **msgspec.to_builtins(run),
                      "efficiency": run.efficiency}
                     for run in runs],
            "speedup_vs_ar": comparison.against_plain,
            "best_fixed": best.strategy if best else None,
            "adaptive_over_best_fixed": comparison.against_fixed if best else None,
        }
    )  # fmt: skip
