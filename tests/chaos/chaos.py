"""`make chaos`: faults against a running stack under load, and the proof that nothing is lost."""

import contextlib
import json
import random
import shutil
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import msgspec
import psutil

from launch.models.pair import pair_of
from launch.settings.flags import Command
from launch.settings.options import settings_of, stack_options
from launch.stack.session import private_stack
from launch.terminal import console
from protocol.errors import LosslessnessError, RuntimeFailure
from protocol.messages import ProcessStatus
from tests.chaos.campaign import Campaign, Outcome, middle
from tests.chaos.faults import Victim
from tests.chaos.load import Load, cases
from tests.chaos.starts import Starts
from tests.chaos.supervisors import kill_supervisors
from tests.chaos.verdict import Verdict, judge

_MANY = 10**9
_LAST_S = 120.0
"""Longest wait for the last answers."""
_HANG_S = 7.0


@click.command("chaos", cls=Command)
@stack_options()
@click.option("--faults", type=click.IntRange(min=1), default=100, show_default=True)
@click.option(
    "--seconds", type=click.FloatRange(min=1), default=3600.0, help="Duration in seconds."
)
@click.option("--clients", type=click.IntRange(min=1), default=2, show_default=True)
@click.option("--http", is_flag=True, help="As many clients more over HTTP, and its faults.")
@click.option("--seed", type=int, default=1, show_default=True)
@click.option("--only", multiple=True, help="Only faults with this in their name; repeatable.")
@click.option(
    "--supervisors",
    type=click.IntRange(min=0),
    default=0,
    help="Also kill so many supervisors of stacks of their own.",
)
@click.option("-m", "--max-tokens", type=click.IntRange(min=1), default=96, show_default=True)
@click.option(
    "--patience",
    type=click.FloatRange(min=1),
    default=120.0,
    show_default=True,
    help="Seconds after which a stack has not mended, or a request hangs.",
)
@click.option(
    "--keep-logs", type=click.Path(path_type=Path, file_okay=False), help="Copy all logs there."
)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the outcome.")
@click.option("--verbose", is_flag=True, help="Name every fault and every change of a process.")
def command(**options: Any) -> None:
    """Do everything to a stack that may happen to it, and compare every token."""
    plan = {name: options.pop(name) for name in _PLAN}
    json_file, verbose = options.pop("json_file"), options.pop("verbose")
    supervisors, keep_logs = options.pop("supervisors"), options.pop("keep_logs")
    settings = msgspec.structs.replace(
        settings_of(**options),
        restarts=_MANY,
        hang_timeout_s=_HANG_S,
        max_waiting=0,
        http=plan["http"],
        port=0,
    )
    seen: dict[int, float] = {}  # when each process was created: its number may be given again
    starts = Starts()

    def report(status: ProcessStatus) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            seen[status.pid] = psutil.Process(status.pid).create_time()
        starts.note(status)
        if verbose:
            console.process_line(status)

    started = time.monotonic()
    with private_stack(settings, report) as supervisor:
        url = supervisor.listener.url if supervisor.listener else ""
        dice = random.Random(plan["seed"])  # noqa: S311  # no secret
        victim = Victim(supervisor.run_dir, dice, url)
        known = cases(supervisor.run_dir.clients_address, plan["max_tokens"])
        address = supervisor.run_dir.clients_address
        load = Load(address, known, plan["clients"], plan["seed"], url=url)
        progress = _say if verbose else _nothing
        campaign = Campaign(victim, load, starts, plan["patience"], progress)
        try:
            campaign.run(plan["faults"], plan["seconds"], plan["only"])
        finally:
            hung = load.end(_LAST_S)
            if keep_logs is not None:
                shutil.copytree(victim.run_dir.path, keep_logs, ignore=_no_log, dirs_exist_ok=True)
    differences = [difference for tally in load.tallies for difference in tally.differences]
    verdicts = judge(differences, pair_of(settings))
    summary = _summary(campaign.outcomes, load, hung, verdicts)
    summary["start_s"] = {
        role: [round(middle(took), 3), round(max(took), 3)] for role, took in starts.took_s.items()
    }
    summary["left"] = _find_leftovers(seen, victim.run_dir.path)
    dice = random.Random(plan["seed"])  # noqa: S311  # no secret
    deaths = kill_supervisors(supervisors, _flags(options), dice)
    summary["supervisors"] = {"killed": deaths.killed, "gone_s": round(middle(deaths.gone_s), 3)}
    summary["left"] += deaths.left
    summary["seconds"] = round(time.monotonic() - started, 1)
    if json_file is not None:
        json_file.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    _print(summary)
    _judge(summary, plan["clients"])


def _flags(options: dict[str, Any]) -> list[str]:
    flags = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if name == "more":
            flags += [word for pair in value for word in ("--set", pair)]
        elif isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            flags += [f"--{flag}", str(value)]
    return flags


_CLOCK_SLACK_S = 2.0
"""Creation times move a little with a correction of the system's clock."""

_PLAN = ("http", "faults", "seconds", "clients", "seed", "only", "max_tokens", "patience")


def _no_log(folder: str, names: list[str]) -> list[str]:
    """What is no log among these."""
    del folder
    return [name for name in names if not name.endswith(".log")]


def _say(line: str) -> None:
    console.stderr().print(line, markup=False)


def _nothing(line: str) -> None:
    del line


def _summary(
    outcomes: dict[str, Outcome], load: Load, hung: int, verdicts: list[Verdict]
) -> dict[str, Any]:
    return {
        "injected": sum(outcome.injected for outcome in outcomes.values()),
        "answered": sum(tally.answered for tally in load.tallies),
        "changed": sum(not verdict.tie for verdict in verdicts),
        "ties": sum(verdict.tie for verdict in verdicts),
        "differences": [asdict(verdict) for verdict in verdicts],
        "cut_off": sum(tally.cut_off for tally in load.tallies),
        "turned_away": sum(tally.turned_away for tally in load.tallies),
        "failed": [reason for tally in load.tallies for reason in tally.failed],
        "hung": hung,
        "classes": {
            name: {
                "injected": outcome.injected,
                "silence_s": [round(middle(outcome.silences_s), 3),
                              round(max(outcome.silences_s, default=0.0), 3)],
                "mended_s": [round(middle(outcome.mended_s), 3),
                             round(max(outcome.mended_s, default=0.0), 3)],
                "beyond_start_s": [round(middle(outcome.beyond_start_s), 3),
                                   round(max(outcome.beyond_start_s, default=0.0), 3)],
            }
            for name, outcome in sorted(outcomes.items())
        },
    }  # fmt: skip


def _find_leftovers(seen: dict[int, float], folder: Path) -> list[str]:
    """Processes and files that should not be there any more."""
    left = [str(folder)] if folder.exists() else []
    for pid, created in seen.items():
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            same = abs(process.create_time() - created) < _CLOCK_SLACK_S
            if same and process.status() != psutil.STATUS_ZOMBIE:
                left.append(f"process {pid}: {' '.join(process.cmdline())}")
    return left


def _print(summary: dict[str, Any]) -> None:
    rows = ["| fault | injected | longest silence, s (median / worst) | whole again, s |",
            "|---|---|---|---|"]  # fmt: skip
    for name, outcome in summary["classes"].items():
        silence, mended = outcome["silence_s"], outcome["mended_s"]
        rows.append(
            f"| {name} | {outcome['injected']} | {silence[0]:.2f} / {silence[1]:.2f} "
            f"| {mended[0]:.2f} / {mended[1]:.2f} |"
        )
    console.write("\n".join(rows) + "\n")
    console.write(
        f"\n{summary['injected']} faults in {summary['seconds']:g} s, "
        f"{summary['answered']} answers: {summary['changed']} changed "
        f"(and {summary['ties']} at a rounding tie), "
        f"{len(summary['failed'])} failed, {summary['hung']} hung, {len(summary['left'])} left\n"
    )
    if summary["cut_off"] or summary["turned_away"]:
        console.write(
            f"{summary['cut_off']} HTTP streams broke off visibly, and "
            f"{summary['turned_away']} requests were told to try again\n"
        )
    for role, (median, worst) in summary["start_s"].items():
        console.write(
            f"a start of the {role} took {median:.2f} s (median), {worst:.2f} s (worst)\n"
        )
    if killed := summary["supervisors"]["killed"]:
        gone = summary["supervisors"]["gone_s"]
        console.write(f"{killed} supervisors killed; their stacks were gone after {gone:.2f} s\n")
    for left in summary["left"]:
        console.write(f"left: {left}\n")
    for reason in sorted(set(summary["failed"])):
        console.write(f"failed: {reason}\n")


def _judge(summary: dict[str, Any], clients: int) -> None:
    if summary["changed"]:
        raise LosslessnessError(f"{summary['changed']} answers were not those of plain decoding")
    ended = sum(c["injected"] for name, c in summary["classes"].items() if "gateway" in name)
    if summary["cut_off"] > ended * clients:
        raise RuntimeFailure("more HTTP streams broke off than gateways were disturbed")
    if summary["failed"] or summary["hung"] or summary["left"]:
        raise RuntimeFailure("answers failed or hung, or something was left behind; see above")
