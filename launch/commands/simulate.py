"""`ssd simulate`: what a device that you do not have would gain."""

from pathlib import Path
from typing import Any

import click

from launch.bench import scenarios
from launch.settings.flags import Command
from launch.terminal import console
from orchestrator.simulation.run import simulate
from orchestrator.simulation.scenario import Scenario, Strategy
from orchestrator.simulation.sweep import compare, strategy_grid
from protocol.messages import MAX_NODES

UNIT = click.FloatRange(0, 1)


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
@click.option("--r", type=float, help="After a rejection, F candidates miss with (1 - first) F^-r.")
@click.option("--first", type=UNIT, help="After a rejection, hit rate with one candidate.")
@click.option("--r-all", type=float, help="As --r, after full acceptance.")
@click.option("--first-all", type=UNIT, help="As --first, after full acceptance.")
@click.option("--burst", type=UNIT, help="How uneven the text is; 0: not at all.")
@click.option("--stretch", type=float, help="Mean length of an easy or hard passage.")
@click.option(
    "--insight", type=UNIT, help="Share of acceptance that the drafter's confidence explains."
)
@click.option("--ipc", type=float, help="Milliseconds per message.")
@click.option("--contention", type=float, help="Slowdown of T_v beside drafting; 0.1: a tenth.")
@click.option(
    "--exchanges",
    type=click.IntRange(min=0),
    help="Exchanges per pass of a target over ranks: two a layer, or one a rank if pipelined.",
)
@click.option("--exchange-bytes", type=float, help="What each carries per token.")
@click.option("--link-ms", type=float, help="Latency of each.")
@click.option("--link-mbytes-per-s", type=float, help="Bandwidth of the link; 0 is any.")
@click.option("--jitter", type=UNIT, help="Spread of every duration.")
@click.option(
    "--whole-tree", is_flag=True, default=None, help="Wait for whole trees, as in the paper."
)
@click.option("--tokens", "-m", type=click.IntRange(min=2), help="Length of the answer.")
@click.option("--seed", type=click.IntRange(min=0))
@click.option("--num-draft-tokens", type=click.IntRange(1, 64), help="Also try this K, fixed.")
@click.option("--branches", type=click.IntRange(1, 256), help="Also try this B, fixed.")
@click.option(
    "--tree-nodes",
    type=click.IntRange(0, MAX_NODES),
    help="Also try verified trees of this many draft tokens, fixed; 0 or 1: chains.",
)
@click.option(
    "--verify-ahead/--no-verify-ahead",
    default=None,
    help="Also try it with prepared rounds that the verifier begins by itself, or never.",
)
@click.option("--sweep", is_flag=True, help="Also try a grid of fixed K and B.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(file: Path | None, preset: str | None, **options: Any) -> None:
    """Simulate decoding on a device that is only described.

    Flags, a TOML file or a preset describe it. The decisions are those of `ssd generate`;
    times and tokens come from models of them.
    """  # fmt: skip
    as_json, sweep = options.pop("as_json"), options.pop("sweep")
    asked = _take_strategy(options)
    given = {name: value for name, value in options.items() if value is not None}
    scenario = scenarios.scenario_of(file, preset, given)
    _run(scenario, asked, sweep=sweep, as_json=as_json)


def _take_strategy(options: dict[str, Any]) -> Strategy:
    """Take the strategy out of the options."""
    return Strategy(
        num_draft_tokens=options.pop("num_draft_tokens") or 0,
        branches=options.pop("branches") or 0,
        tree_nodes=options.pop("tree_nodes"),
        verify_ahead=options.pop("verify_ahead"),
    )


def _run(scenario: Scenario, asked: Strategy, *, sweep: bool, as_json: bool) -> None:
    with console.stderr().status("simulating") as status:
        found = compare(scenario, strategy_grid() if sweep else (), status.update)
        runs = [found.plain, found.sequential, found.chains, found.adaptive]
        if asked != Strategy():
            runs.append(simulate(scenario, asked))
    if found.best_fixed is not None:
        runs.append(found.best_fixed)
    if as_json:
        all_runs = [*runs[:-1], *found.fixed] if found.fixed else runs
        click.echo(scenarios.as_json(scenario, all_runs, found))
        return
    out = console.stdout()
    out.print(scenarios.HEADLINE, markup=False)
    out.print(f"{scenario.name}: {scenario.note}" if scenario.note else scenario.name, markup=False)
    out.print(scenarios.table(runs, found.plain))
    out.print(scenarios.LEGEND, markup=False)
    if found.fixed:
        out.print(scenarios.grid(found))
    out.print(scenarios.verdict(found), markup=False)
