"""`ssd simulate`: the gain on a device that you do not have."""

from pathlib import Path
from typing import Any

import click

from launch.bench import scenarios
from launch.models.recommendation import say_schedule
from launch.settings.flags import Command, more_settings, read_more
from launch.terminal import console
from orchestrator.learning.schedule import ASSUMED_HITS, plan_schedule
from orchestrator.simulation.latency_curve import curve
from orchestrator.simulation.run import simulate
from orchestrator.simulation.scenario import AcceptanceModel, Device, Scenario, Strategy
from orchestrator.simulation.sweep import compare, strategy_grid
from protocol.messages import MAX_NODES, Schedule

UNIT = click.FloatRange(0, 1)
MORE = tuple(
    name
    for kind in (Device, AcceptanceModel, Scenario)
    for name in kind.__struct_fields__
    if name not in {"t_verify", "t_draft", "alpha", "seed", "branches", "device", "acceptance"}
)
"""Further settings of a device, a pair and an answer: `orchestrator/simulation/scenario.py`."""


@click.command("simulate", cls=Command)
@click.argument("file", required=False, type=click.Path(path_type=Path))
@click.option(
    "--preset",
    type=click.Choice(scenarios.presets()),
    metavar="NAME",
    help=f"A device that comes with a description: {', '.join(scenarios.presets())}.",
)
@click.option("--t-verify", help="T_v(m) in ms: 49 for any m, or 1:49,2:54,4:62,6:79.")
@click.option("--t-draft", help="T_d(B) of a tree step over B branches in ms, likewise.")
@click.option("--alpha", type=UNIT, help="Acceptance rate of draft tokens.")
@more_settings(MORE)
@click.option("--seed", type=click.IntRange(min=0))
@click.option("--num-draft-tokens", type=click.IntRange(1, 64), help="Also try this K, fixed.")
@click.option("--branches", type=click.IntRange(1, 256), help="Also try this B, fixed.")
@click.option(
    "--tree-nodes",
    type=click.IntRange(0, MAX_NODES),
    help="Also try verified trees of this many draft tokens, fixed; 0 or 1: chains.",
)
@click.option("--sweep", is_flag=True, help="Also try a grid of fixed K and B.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(file: Path | None, preset: str | None, **options: Any) -> None:
    """Simulate decoding on a device that is only described.

    Flags, a TOML file or a preset describe it. The decisions are those of `ssd generate`;
    times and tokens come from models of them.
    """  # fmt: skip
    as_json, sweep = options.pop("as_json"), options.pop("sweep")
    strategy = _take_strategy(options)
    values = read_more(options.pop("more"), MORE)
    values |= {name: value for name, value in options.items() if value is not None}
    scenario = scenarios.scenario_of(file, preset, values)
    _run(scenario, strategy, sweep=sweep, as_json=as_json)


def _take_strategy(options: dict[str, Any]) -> Strategy:
    """Take the strategy out of the options."""
    return Strategy(
        num_draft_tokens=options.pop("num_draft_tokens") or 0,
        branches=options.pop("branches") or 0,
        tree_nodes=options.pop("tree_nodes") or 0,
    )


def _run(scenario: Scenario, strategy: Strategy, *, sweep: bool, as_json: bool) -> None:
    with console.stderr().status("simulating") as status:
        comparison = compare(scenario, strategy_grid() if sweep else (), status.update)
        runs = [comparison.plain, comparison.sequential, comparison.adaptive]
        if strategy != Strategy():
            runs.append(simulate(scenario, strategy))
    if comparison.best_fixed is not None:
        runs.append(comparison.best_fixed)
    if as_json:
        all_runs = [*runs[:-1], *comparison.fixed] if comparison.fixed else runs
        click.echo(scenarios.as_json(scenario, all_runs, comparison))
        return
    out = console.stdout()
    out.print(scenarios.HEADLINE, markup=False)
    out.print(f"{scenario.name}: {scenario.note}" if scenario.note else scenario.name, markup=False)
    out.print(f"expected at first: {say_schedule(_plan(scenario))}", markup=False)
    out.print(scenarios.table(runs, comparison.plain))
    out.print(scenarios.LEGEND, markup=False)
    if comparison.fixed:
        out.print(scenarios.grid(comparison))
    out.print(scenarios.verdict(comparison), markup=False)


def _plan(scenario: Scenario) -> Schedule:
    """Return the schedule that the planner would begin with if it knew the acceptance rate."""
    device = scenario.device
    alone, draft_ms = curve(device.t_verify), curve(device.t_draft).of(1)
    return plan_schedule(
        alone.of,
        lambda rows: (1.0 + device.contention) * alone.of(rows),
        draft_ms,
        scenario.acceptance.alpha,
        hits=0.0 if device.shares_cores else ASSUMED_HITS,
    )
