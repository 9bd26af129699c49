"""`make soak`: a long load of mixed requests with random cancels; nothing may grow or drift."""

import contextlib
import json
import random
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
from launch.stack.supervisor import Supervisor
from launch.terminal import console
from protocol.errors import LosslessnessError, RuntimeFailure
from tests.chaos.faults import ROLES, Victim
from tests.chaos.growth import Series
from tests.chaos.load import Load, cases
from tests.chaos.verdict import Verdict, judge

_MOST_MB = 32.0
_MOST_SHARE = 0.05
"""A process may grow by the larger of these between its second and its last quarter."""
_FEWEST_SAMPLES = 100
"""Fewer say nothing of growth: how many clients are connected differs between two of them."""
_SAY_EVERY_S = 60.0
_LAST_S = 120.0
"""Longest wait for the last answers."""


@click.command("soak", cls=Command)
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
    and fails the request if they differ: no failed request means no drift. Ctrl-C ends
    it early, with the figures so far.
    """
    plan = {name: options.pop(name) for name in _PLAN}
    json_file = options.pop("json_file")
    settings = msgspec.structs.replace(settings_of(**options), max_waiting=0)
    with private_stack(settings, console.report_trouble) as supervisor:
        address = supervisor.run_dir.clients_address
        known = cases(address, plan["max_tokens"])
        load = Load(address, known, plan["clients"], plan["seed"], cancels=plan["cancels"])
        watch = _Watch(supervisor, load)
        watch.run(60 * plan["minutes"], plan["every"])
        hung, replaced = load.end(_LAST_S), watch.list_replaced()
    differences = [difference for tally in load.tallies for difference in tally.differences]
    summary = _summary(load, watch.series, hung, judge(differences, pair_of(settings)))
    summary["replaced"] = replaced
    if json_file is not None:
        json_file.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    _print(summary)
    _judge(summary)


_PLAN = ("minutes", "clients", "cancels", "every", "seed", "max_tokens")


class _Watch:
    """Samples every process, says once in a while how it goes, and ends early on Ctrl-C."""

    def __init__(self, supervisor: Supervisor, load: Load) -> None:
        self._load = load
        # Which processes there are is all that is asked: nothing is drawn, nothing hurt.
        self._victim = Victim(supervisor.run_dir, random.Random(0))  # noqa: S311  # no secret
        self.series = {role: Series() for role in (*ROLES, "supervisor")}
        self._pids = self._find_pids()

    def _find_pids(self) -> dict[str, int]:
        statuses = self._victim.processes()
        pids = {role: one.pid for role, one in statuses.items() if role in self.series}
        return pids | {"supervisor": psutil.Process().pid}

    def run(self, seconds: float, every_s: float) -> None:
        """Sample for so long, or until the user has seen enough."""
        start = said = time.monotonic()
        with contextlib.suppress(KeyboardInterrupt):
            while (now := time.monotonic()) < start + seconds:
                for role, pid in self._pids.items():
                    self.series[role].take(pid)
                if now > said + _SAY_EVERY_S:
                    said = now
                    self._say((now - start) / 60)
                time.sleep(min(every_s, max(0.0, start + seconds - now)))

    def _say(self, minutes: float) -> None:
        sizes = {role: one.megabytes[-1] for role, one in self.series.items() if one.megabytes}
        memory = ", ".join(f"{role} {size:.0f} MB" for role, size in sizes.items())
        answers = sum(tally.answered for tally in self._load.tallies)
        console.stderr().print(f"{minutes:.0f} min: {answers} answers; {memory}")

    def list_replaced(self) -> list[str]:
        """Roles whose process is another one than at the beginning."""
        found = self._find_pids()
        return [role for role, pid in self._pids.items() if found.get(role, pid) != pid]


def _summary(
    load: Load, series: dict[str, Series], hung: int, verdicts: list[Verdict]
) -> dict[str, Any]:
    return {
        "answered": sum(tally.answered for tally in load.tallies),
        "cancelled": sum(tally.cancelled for tally in load.tallies),
        "changed": sum(not verdict.tie for verdict in verdicts),
        "ties": sum(verdict.tie for verdict in verdicts),
        "differences": [asdict(verdict) for verdict in verdicts],
        "failed": [reason for tally in load.tallies for reason in tally.failed],
        "hung": hung,
        "processes": {
            role: dict(zip(("mb_early", "mb_late", "fds_early", "fds_late"), one.growth(),
                           strict=True), samples=len(one.megabytes))
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
    console.write("\n".join(rows) + "\n")
    console.write(
        f"\n{summary['answered']} answers, {summary['cancelled']} cancelled: "
        f"{summary['changed']} changed (and {summary['ties']} at a rounding tie), "
        f"{len(summary['failed'])} failed, {summary['hung']} hung\n"
    )
    for reason in sorted(set(summary["failed"])):
        console.write(f"failed: {reason}\n")


def _judge(summary: dict[str, Any]) -> None:
    if summary["changed"]:
        raise LosslessnessError(f"{summary['changed']} answers were not those of plain decoding")
    if summary["failed"] or summary["hung"]:
        raise RuntimeFailure("answers failed or hung; see above")
    if summary["replaced"]:
        raise RuntimeFailure(f"restarted on the way: {', '.join(summary['replaced'])}")
    for role, found in summary["processes"].items():
        if found["samples"] < _FEWEST_SAMPLES:
            continue
        if found["mb_late"] - found["mb_early"] > max(_MOST_MB, _MOST_SHARE * found["mb_early"]):
            raise RuntimeFailure(f"the memory of the {role} grows; see above")
        if found["fds_late"] > found["fds_early"] + 2:
            raise RuntimeFailure(f"the {role} loses file descriptors; see above")
