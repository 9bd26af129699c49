"""`ssd chaos`: faults against a running stack under load, and the proof that nothing is lost."""

import contextlib
import json
import random
import time
from pathlib import Path
from typing import Any

import click
import msgspec
import psutil

from launch import show
from launch.chaos.campaign import Campaign, Outcome, middle
from launch.chaos.faults import Victim
from launch.chaos.load import Load, cases
from launch.chaos.supervisors import kill_supervisors
from launch.options import settings_of, stack_options
from launch.session import private_stack
from protocol.errors import LosslessnessError, RuntimeFailure
from protocol.messages import ProcessStatus

_MANY = 10**9
_HANG_S = 3.0


@click.command("chaos")
@stack_options()
@click.option("--faults", type=click.IntRange(min=1), default=100, show_default=True)
@click.option("--seconds", type=click.FloatRange(min=1), default=3600.0, help="Stop after so long.")
@click.option("--clients", type=click.IntRange(min=1), default=2, show_default=True)
@click.option("--seed", type=int, default=1, show_default=True)
@click.option("--only", multiple=True, help="Only faults with this in their name; repeatable.")
@click.option(
    "--supervisors",
    type=click.IntRange(min=0),
    default=0,
    help="Also kill so many supervisors of stacks of their own.",
)
@click.option("-m", "--max-tokens", type=click.IntRange(min=1), default=96, show_default=True)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the outcome.")
@click.option("--verbose", is_flag=True, help="Name every fault and every change of a process.")
def command(**options: Any) -> None:
    """Do everything to a stack that may happen to it, and compare every token."""
    plan = {name: options.pop(name) for name in _PLAN}
    json_file, verbose = options.pop("json_file"), options.pop("verbose")
    supervisors = options.pop("supervisors")
    settings = msgspec.structs.replace(
        settings_of(**options), restarts=_MANY, hang_timeout_s=_HANG_S, max_waiting=0
    )
    pids: set[int] = set()

    def report(status: ProcessStatus) -> None:
        pids.add(status.pid)
        if verbose:
            show.process_line(status)

    started = time.monotonic()
    with private_stack(settings, report) as supervisor:
        victim = Victim(supervisor.run_dir, random.Random(plan["seed"]))  # noqa: S311  # no secret
        known = cases(supervisor.run_dir.clients_address, plan["max_tokens"])
        load = Load(supervisor.run_dir.clients_address, known, plan["clients"], plan["seed"])
        campaign = Campaign(victim, load, _say if verbose else _nothing)
        try:
            campaign.run(plan["faults"], plan["seconds"], plan["only"])
        finally:
            hung = load.end(60.0)
    summary = _summary(campaign.outcomes, load, hung)
    summary["left"] = _left(pids, victim.run_dir.path)
    dice = random.Random(plan["seed"])  # noqa: S311  # no secret
    deaths = kill_supervisors(supervisors, _flags(options), dice)
    summary["supervisors"] = {"killed": deaths.killed, "gone_s": round(middle(deaths.gone_s), 3)}
    summary["left"] += deaths.left
    summary["seconds"] = round(time.monotonic() - started, 1)
    if json_file is not None:
        json_file.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    _print(summary)
    _judge(summary)


def _flags(options: dict[str, Any]) -> list[str]:
    given = {name: value for name, value in options.items() if value is not None}
    return [
        part
        for name, value in given.items()
        for part in (f"--{name.replace('_', '-')}", str(value))
    ]


_PLAN = ("faults", "seconds", "clients", "seed", "only", "max_tokens")


def _say(line: str) -> None:
    show.human().print(line, markup=False)


def _nothing(line: str) -> None:
    del line


def _summary(outcomes: dict[str, Outcome], load: Load, hung: int) -> dict[str, Any]:
    return {
        "injected": sum(outcome.injected for outcome in outcomes.values()),
        "answered": sum(tally.answered for tally in load.tallies),
        "changed": sum(tally.changed for tally in load.tallies),
        "failed": [reason for tally in load.tallies for reason in tally.failed],
        "hung": hung,
        "classes": {
            name: {
                "injected": outcome.injected,
                "silence_s": [round(middle(outcome.silences_s), 3),
                              round(max(outcome.silences_s, default=0.0), 3)],
                "mended_s": [round(middle(outcome.mended_s), 3),
                             round(max(outcome.mended_s, default=0.0), 3)],
            }
            for name, outcome in sorted(outcomes.items())
        },
    }  # fmt: skip


def _left(pids: set[int], folder: Path) -> list[str]:
    """Processes and files that should not be there any more."""
    left = [str(folder)] if folder.exists() else []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            if process.status() != psutil.STATUS_ZOMBIE and "ssd " in " ".join(process.cmdline()):
                left.append(f"process {pid}")
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
    show.write("\n".join(rows) + "\n")
    show.write(
        f"\n{summary['injected']} faults in {summary['seconds']:g} s, "
        f"{summary['answered']} answers: {summary['changed']} changed, "
        f"{len(summary['failed'])} failed, {summary['hung']} hung, {len(summary['left'])} left\n"
    )
    if killed := summary["supervisors"]["killed"]:
        gone = summary["supervisors"]["gone_s"]
        show.write(f"{killed} supervisors killed; their stacks were gone after {gone:.2f} s\n")
    for left in summary["left"]:
        show.write(f"left: {left}\n")
    for reason in sorted(set(summary["failed"])):
        show.write(f"failed: {reason}\n")


def _judge(summary: dict[str, Any]) -> None:
    if summary["changed"]:
        raise LosslessnessError(f"{summary['changed']} answers were not those of plain decoding")
    if summary["failed"] or summary["hung"] or summary["left"]:
        raise RuntimeFailure("answers failed or hung, or something was left behind; see above")
