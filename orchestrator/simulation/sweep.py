"""Compares the planner with every fixed pair of K and B."""

from collections.abc import Callable, Iterable
from itertools import product

import msgspec

from orchestrator.simulation.run import Run, simulate
from orchestrator.simulation.scenario import Scenario, Strategy

LOOKAHEADS = (1, 2, 3, 4, 6, 8)
BUDGETS = (4, 8, 16, 32)


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """The results of one scenario under every strategy."""

    plain: Run
    sequential: Run
    """Sequential speculative decoding, adaptive."""
    adaptive: Run
    """SSD with its default settings."""
    fixed: list[Run] = []
    """SSD with fixed K and B."""

    @property
    def best_fixed(self) -> Run | None:
        """The fastest of the fixed ones."""
        return max(self.fixed, key=lambda run: run.tok_s, default=None)

    @property
    def against_fixed(self) -> float:
        """Adaptive tok/s over the best fixed pair's; above 1 the planner wins."""
        best = self.best_fixed
        return self.adaptive.tok_s / best.tok_s if best else 1.0

    @property
    def against_plain(self) -> float:
        """Adaptive tok/s over plain decoding's."""
        return self.adaptive.tok_s / self.plain.tok_s


def strategy_grid(
    lookaheads: Iterable[int] = LOOKAHEADS,
    budgets: Iterable[int] = BUDGETS,
) -> list[Strategy]:
    """Return all pairs of K and B."""
    return [
        Strategy(num_draft_tokens=num_draft_tokens, branches=budget)
        for num_draft_tokens, budget in product(lookaheads, budgets)
    ]


def compare(
    scenario: Scenario,
    fixed: Iterable[Strategy] = (),
    progress: Callable[[str], None] = lambda _: None,
) -> Comparison:
    """Simulate the strategies one after the other; `progress` gets the label of the next one."""

    def run(strategy: Strategy) -> Run:
        progress(strategy.label)
        return simulate(scenario, strategy)

    return Comparison(
        plain=run(Strategy(mode="ar")),
        sequential=run(Strategy(mode="sd")),
        adaptive=run(Strategy()),
        fixed=[run(strategy) for strategy in fixed],
    )
