"""What the orchestrator's decisions take, without processes: a depth, an outcome, its books.

    PYTHONPATH=. python docs/lab/orchestrator_times.py [--trees]

Sixty rounds with 32 branches and cheap rows, as on two GPUs, by the fakes of the tests;
milliseconds: median, the ninth of ten, the longest.
"""

import argparse
import statistics
import time
from collections import defaultdict
from typing import Any

from orchestrator.sequence.limits import Limits
from orchestrator.sequence.phase import Phase
from tests.support.fakes import Stack, Target

ROUNDS = 60
EVENTS = {"a depth": "on_tree", "an outcome": "decide", "its books": "record"}


def start(*, trees: bool) -> Stack:
    """A request whose drafts are mostly right."""
    stack = Stack(
        mode="ssd",
        target=Target(3),
        prompt=[1, 2],
        limits=Limits(max_tokens=400, stop_ids=frozenset(), context_length=0),
        budget=32,
        skill=0.8,
        trees=trees,
        tree_nodes=None if trees else 1,
        row_ms=0.1,
    )
    stack.verifier_comes()
    stack.drafter_comes()
    return stack


def measure(stack: Stack) -> dict[str, list[float]]:
    """Milliseconds of every event."""
    times: dict[str, list[float]] = defaultdict(list)

    def timed(name: str, answer: Any) -> Any:
        def run(*args: Any) -> Any:
            began = time.perf_counter()
            actions = answer(*args)
            times[name].append(1e3 * (time.perf_counter() - began))
            return actions

        return run

    for name, method in EVENTS.items():
        setattr(stack.sequence, method, timed(name, getattr(stack.sequence, method)))
    for _ in range(ROUNDS):
        if stack.sequence.phase is not Phase.FINISHED:
            stack.calm_round()
    return times


def main() -> None:
    """Print a line for each kind of event."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--trees", action="store_true")
    stack = start(trees=parser.parse_args().trees)
    for name, times in measure(stack).items():
        ninth = statistics.quantiles(times, n=10)[8]
        print(f"{name}: {statistics.median(times):.2f}, {ninth:.2f}, {max(times):.2f}")
    print(f"{stack.sequence.recorder.rounds} rounds, {stack.sequence.recorder.hits} hits")


if __name__ == "__main__":
    main()
