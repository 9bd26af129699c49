"""T_d(B), learned: a tree step is a straight line in its branches, the chain comes on top."""

from orchestrator.learning.snapshot import Line

_FADE = 0.99
_RIDGE = 0.2
"""What the assumed slope weighs: a variance of the widths, in branches squared."""
_ASSUMED_SLOPE = 0.02
"""Assumed extra cost per branch, as a share of a step, where only one width was measured."""
_RECALLED = 8.0
"""Most steps that a remembered line counts for."""


class StepCost:
    """Fed with the layers that a drafter sends; milliseconds."""

    def __init__(self) -> None:
        self._weight = 0.0
        self._branches = self._ms = 0.0
        self._squares = self._products = 0.0
        self._first_ms = self._firsts = 0.0
        self._chain_ms = self._chains = 0.0

    def observe(self, depth: int, branches: int, milliseconds: float) -> None:
        """One depth of so many branches took this long; the first takes in the chain as well."""
        if depth == 1:
            self._first(branches, milliseconds)
            return
        self._weight = _FADE * self._weight + 1.0
        step = 1.0 / self._weight
        self._branches += step * (branches - self._branches)
        self._ms += step * (milliseconds - self._ms)
        self._squares += step * (branches**2 - self._squares)
        self._products += step * (branches * milliseconds - self._products)

    def _first(self, branches: int, milliseconds: float) -> None:
        self._firsts = _FADE * self._firsts + 1.0
        self._first_ms += (milliseconds - self._first_ms) / self._firsts
        if not self._weight:
            self._branches = float(branches)
            return
        self._chains = _FADE * self._chains + 1.0
        extra = max(0.0, milliseconds - self.of(branches))
        self._chain_ms += (extra - self._chain_ms) / self._chains

    @property
    def known(self) -> bool:
        """Whether there was anything to learn from."""
        return self._firsts + self._weight > 0.0

    @property
    def chain_ms(self) -> float:
        """What the first depth takes beyond a step; half of it until a step was seen."""
        return self._chain_ms if self._weight else 0.5 * self._first_ms

    def of(self, branches: int) -> float:
        """A step over so many branches, at least half of the mean step; 0 if none is known."""
        if not self._weight:
            mean = 0.5 * self._first_ms
            return max(0.5 * mean, mean * (1.0 + _ASSUMED_SLOPE * (branches - self._branches)))
        spread = self._squares - self._branches**2
        together = self._products - self._branches * self._ms
        # A little of the assumed slope keeps a single width from meaning anything.
        assumed = _ASSUMED_SLOPE * self._ms
        slope = (together + _RIDGE * assumed) / (max(0.0, spread) + _RIDGE)
        return max(0.5 * self._ms, self._ms + max(0.0, slope) * (branches - self._branches))

    def memory(self) -> Line:
        """For another run."""
        return Line(
            weight=self._weight,
            branches=self._branches,
            milliseconds=self._ms,
            squares=self._squares,
            products=self._products,
            first_ms=self._first_ms,
            firsts=self._firsts,
            chain_ms=self._chain_ms,
            chains=self._chains,
        )

    def recall(self, remembered: Line) -> None:
        """Begin with what was known."""
        self._weight = min(remembered.weight, _RECALLED)
        self._branches, self._ms = remembered.branches, remembered.milliseconds
        self._squares, self._products = remembered.squares, remembered.products
        self._first_ms, self._firsts = remembered.first_ms, min(remembered.firsts, _RECALLED)
        self._chain_ms, self._chains = remembered.chain_ms, min(remembered.chains, _RECALLED)
