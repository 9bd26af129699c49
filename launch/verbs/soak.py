"""`ssd soak`: a long load of mixed requests with random cancels; nothing may grow or drift."""

import json
import random
import time
from pathlib import Path
from typing import Any

import click
import msgspec
import psutil

from launch import show
from launch.chaos.faults import ROLES, Victim
from launch.chaos.gauge import Series
from launch.chaos.load import Load, cases
from launch.options import settings_of, stack_options
from launch.session import private_stack
from launch.supervisor import Supervisor
from protocol.errors import LosslessnessError, RuntimeFailure

_MOST_MB = 32.0
_MOST_SHARE = 0.05
"""A process may grow by the larger of these between its second and its last quarter."""


@click.command("soak")
@stack_options()
@click.option("--minutes", type=click.FloatRange(min=0.1), default=60.0, show_default=True)
@click.option("--clients", type=click.IntRange(min=1), default=4, show_default=True)
@click.option(
    "--cancels",
    type=click.FloatRange(0, 1),
    default=0.2,
    show_default=True,
    help="Share of requests that are cancelled somewhere on the way.",
)
@click.option("--every", type=click.FloatRange(min=0.1), default=2.0, help="Seconds per sample.")
@click.option("--seed", type=int, default=1, show_default=True)
@click.option("-m", "--max-tokens", type=click.IntRange(min=1), default=96, show_default=True)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the outcome.")
def command(**options: Any) -> None:  # fmt: skip
    """Ask for a long time, cancel at random, and watch memory, descriptors and every token.

    The verifier compares the length of its KV with the committed tokens before each round
    and fails the request if they differ: no failed request means no drift.
    """
    plan = {name: options.pop(name) for name in _PLAN}
    json_file = options.pop("json_file")
    settings = msgspec.structs.replace(settings_of(**options), max_waiting=0)
    with private_stack(settings, show.nothing) as supervisor:
        address = supervisor.run_dir.clients_address
        known = cases(address, plan["max_tokens"])
        load = Load(address, known, plan["clients"], plan["seed"], plan["cancels"])
        series = _watch(supervisor, 60 * plan["minutes"], plan["every"])
        hung = load.end(60.0)
    summary = _summary(load, series, hung)
    if json_file is not None:
        json_file.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    _print(summary)
    _judge(summary)


_PLAN = ("minutes", "clients", "cancels", "every", "seed", "max_tokens")


def _watch(supervisor: Supervisor, seconds: float, every_s: float) -> dict[str, Series]:
    series = {role: Series() for role in ROLES}
    series["supervisor"] = Series()
    victim = Victim(supervisor.run_dir, random.Random(0))  # noqa: S311  # no secret
    pids = {role: status.pid for role, status in victim.processes().items() if role in series}
    pids["supervisor"] = psutil.Process().pid
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for role, pid in pids.items():
            series[role].take(pid)
        time.sleep(every_s)
    return series


def _summary(load: Load, series: dict[str, Series], hung: int) -> dict[str, Any]:
    return {
        "answered": sum(tally.answered for tally in load.tallies),
        "cancelled": sum(tally.cancelled for tally in load.tallies),
        "changed": sum(tally.changed for tally in load.tallies),
        "failed": [reason for tally in load.tallies for reason in tally.failed],
        "hung": hung,
        "processes": {
            role: dict(zip(("mb_early", "mb_late", "fds_early", "fds_late"), one.growth(),
                           strict=True))
            for role, one in series.items()
            if one.megabytes
        },
    }  # fmt: skip


def _print(summary: dict[str, Any]) -> None:
    rows = ["| process | MB, second quarter | MB, last quarter | descriptors |"]
    rows.append("|---|---|---|---|")
    for role, found in summary["processes"].items():
        rows.append(
            f"| {role} | {found['mb_early']:.1f} | {found['mb_late']:.1f} "
            f"| {found['fds_early']:g} -> {found['fds_late']:g} |"
        )
    show.write("\n".join(rows) + "\n")
    show.write(
        f"\n{summary['answered']} answers, {summary['cancelled']} cancelled: "
        f"{summary['changed']} changed, {len(summary['failed'])} failed, {summary['hung']} hung\n"
    )
    for reason in sorted(set(summary["failed"])):
        show.write(f"failed: {reason}\n")


def _judge(summary: dict[str, Any]) -> None:
    if summary["changed"]:
        raise LosslessnessError(f"{summary['changed']} answers were not those of plain decoding")
    if summary["failed"] or summary["hung"]:
        raise RuntimeFailure("answers failed or hung; see above")
    for role, found in summary["processes"].items():
        if found["mb_late"] - found["mb_early"] > max(_MOST_MB, _MOST_SHARE * found["mb_early"]):
            raise RuntimeFailure(f"the memory of the {role} grows; see above")
        if found["fds_late"] > found["fds_early"] + 2:
            raise RuntimeFailure(f"the {role} loses file descriptors; see above")
