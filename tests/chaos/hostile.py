"""`python -m tests.chaos hostile`: bystanders beside a long hostile load."""

import contextlib
import json
import random
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import msgspec

from launch.models.pair import pair_of
from launch.settings.flags import Command
from launch.settings.options import settings_of, stack_options
from launch.stack.session import private_stack
from launch.stack.supervisor import Supervisor
from launch.terminal import console
from protocol.client.client import Client
from protocol.errors import LosslessnessError, RuntimeFailure
from protocol.process.child import raise_descriptor_limit
from tests.chaos import crowd
from tests.chaos.attacks import Attack, Attackers
from tests.chaos.faults import Victim
from tests.chaos.load import Load, cases
from tests.chaos.verdict import Verdict, judge

_MANY = 10**9
_SAY_EVERY_S = 300.0
_LAST_S = 120.0
"""Longest wait for the last answers."""
_CONTEXT = 4096
"""Of a target without a limit."""
_LASTING = ("orchestrator", "verifier", "gateway")
"""Processes that nothing may end. A drafter gives way to one that comes to its socket."""


@click.command("hostile", cls=Command)
@stack_options()
@click.option("--minutes", type=click.FloatRange(min=0.0), default=60.0, show_default=True)
@click.option("--quiet-minutes", type=click.FloatRange(min=0.01), default=2.0, show_default=True)
@click.option("--clients", type=click.IntRange(min=1), default=4, show_default=True)
@click.option("--attackers", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--drafters/--no-drafters", default=True, help="Hostile drafters, too.")
@click.option(
    "--crowd-seconds",
    type=click.FloatRange(min=0.0),
    default=20.0,
    show_default=True,
    help="For each attack of clients that take all they can get, after the others; 0: none.",
)
@click.option("--only", default="", help="Those of them whose name contains this.")
@click.option("--seed", type=int, default=1, show_default=True)
@click.option("-m", "--max-tokens", type=click.IntRange(min=1), default=48, show_default=True)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the outcome.")
def command(**options: Any) -> None:
    """Send everything hostile that there is, and compare every token of the bystanders.

    First they are alone for a while, for their usual longest wait. Ctrl-C ends it early.
    """
    plan = {name: options.pop(name) for name in _PLAN}
    json_file = options.pop("json_file")
    settings = msgspec.structs.replace(settings_of(**options), restarts=_MANY, http=True, port=0)
    raise_descriptor_limit()
    with private_stack(settings, console.report_trouble) as supervisor:
        if supervisor.listener is None:
            raise AssertionError("a stack with HTTP has a listener")
        address, url = supervisor.run_dir.clients_address, supervisor.listener.url
        dice = random.Random(plan["seed"])  # noqa: S311  # no secret
        victim = Victim(supervisor.run_dir, dice, url)
        known = cases(address, plan["max_tokens"])
        load = Load(address, known, plan["clients"], plan["seed"])
        before = _find_pids(victim)
        alone_s = _watch(load, {}, plan["quiet_minutes"] * 60)
        services = supervisor.run_dir.services_address
        drafters = plan["drafters"]
        attackers = Attackers(url, services, plan["attackers"], plan["seed"], drafters=drafters)
        beside_s = _watch(load, attackers.attacks, plan["minutes"] * 60)
        hung = attackers.end(_LAST_S)
        stuck = load.end(_LAST_S)
        misses = _attack_in_crowds(supervisor, url, plan)
        after = _find_pids(victim)
    differences = [difference for tally in load.tallies for difference in tally.differences]
    summary = _summary(load, attackers.attacks, judge(differences, pair_of(settings)))
    summary["misses"] = misses
    summary |= {"hung": stuck, "attackers_hung": hung}
    summary |= {"wait_alone_s": round(alone_s, 2), "wait_beside_s": round(beside_s, 2)}
    summary["replaced"] = [role for role in _LASTING if before[role] != after.get(role)]
    if json_file is not None:
        json_file.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    _print(summary)
    _judge(summary)


_PLAN = (
    "minutes", "quiet_minutes", "clients", "attackers", "drafters", "seed", "max_tokens",
    "crowd_seconds", "only",
)  # fmt: skip


def _attack_in_crowds(supervisor: Supervisor, url: str, plan: dict[str, Any]) -> list[str]:
    """Measure how long bystanders wait beside crowds; the goals that were missed."""
    if not plan["crowd_seconds"]:
        return []
    with contextlib.closing(Client(supervisor.run_dir.clients_address)) as client:
        services = client.status().services
    context = next(one.context_length for one in services if one.role == "verifier")
    misses: list[str] = []
    crowd.print_head()
    for row in crowd.attack(
        url,
        context or _CONTEXT,
        seconds=plan["crowd_seconds"],
        max_tokens=plan["max_tokens"],
        only=plan["only"],
    ):
        crowd.print_row(row)
        misses += row.misses
    return misses


def _find_pids(victim: Victim) -> dict[str, int]:
    return {role: one.pid for role, one in victim.processes().items()}


def _watch(load: Load, attacks: dict[str, Attack], seconds: float) -> float:
    """The longest silence that any bystander had in this time."""
    start = said = time.monotonic()
    worst = 0.0
    with contextlib.suppress(KeyboardInterrupt):
        while (now := time.monotonic()) < start + seconds:
            time.sleep(min(2.0, max(0.0, start + seconds - now)))
            worst = max(worst, load.silence_s(now, time.monotonic()), load.quiet_s)
            if now > said + _SAY_EVERY_S:
                said = now
                _say((now - start) / 60, load, attacks, worst)
    return worst


def _say(minutes: float, load: Load, attacks: dict[str, Attack], worst: float) -> None:
    answers = sum(tally.answered for tally in load.tallies)
    failed = sum(len(tally.failed) for tally in load.tallies)
    sent = sum(attack.sent for attack in list(attacks.values()))
    console.stderr().print(
        f"{minutes:.0f} min: {answers} answers beside {sent} attacks, {failed} failed, "
        f"longest wait {worst:.1f} s"
    )


def _summary(load: Load, attacks: dict[str, Attack], verdicts: list[Verdict]) -> dict[str, Any]:
    return {
        "answered": sum(tally.answered for tally in load.tallies),
        "changed": sum(not verdict.tie for verdict in verdicts),
        "ties": sum(verdict.tie for verdict in verdicts),
        "differences": [asdict(verdict) for verdict in verdicts],
        "failed": [reason for tally in load.tallies for reason in tally.failed],
        "attacks": {
            kind: {
                "sent": attack.sent,
                "statuses": dict(sorted(attack.statuses.items())),
                "worst_s": round(attack.worst_s, 2),
                "failed": sorted(attack.failed),
            }
            for kind, attack in sorted(attacks.items())
        },
    }


def _print(summary: dict[str, Any]) -> None:
    rows = ["| attack | sent | statuses | longest, s |", "|---|---|---|---|"]
    for kind, one in summary["attacks"].items():
        statuses = ", ".join(f"{status}: {count}" for status, count in one["statuses"].items())
        rows.append(f"| {kind} | {one['sent']} | {statuses} | {one['worst_s']:.1f} |")
    console.write("\n".join(rows) + "\n")
    console.write(
        f"\n{summary['answered']} answers of bystanders: {summary['changed']} changed "
        f"(and {summary['ties']} at a rounding tie), {len(summary['failed'])} failed, "
        f"{summary['hung']} hung; longest wait {summary['wait_alone_s']:.2f} s alone, "
        f"{summary['wait_beside_s']:.2f} s beside the attacks\n"
    )
    for reason in sorted(set(summary["failed"])):
        console.write(f"failed: {reason}\n")
    for one in summary["attacks"].values():
        for name in one["failed"]:
            console.write(f"answered by {name}\n")


def _judge(summary: dict[str, Any]) -> None:
    if summary["changed"]:
        raise LosslessnessError(f"{summary['changed']} answers were not those of plain decoding")
    if summary["failed"] or summary["hung"] or summary["attackers_hung"]:
        raise RuntimeFailure("answers failed or hung; see above")
    if summary["misses"]:
        raise RuntimeFailure("; ".join(summary["misses"]))
    if summary["replaced"]:
        raise RuntimeFailure(f"restarted on the way: {', '.join(summary['replaced'])}")
    if any(one["failed"] for one in summary["attacks"].values()):
        raise RuntimeFailure("the server failed at requests that it should have refused")
