"""A drafter by itself, round after round: when its depths are ready behind a hit and a miss.

    PYTHONPATH=. python docs/lab/draft_rounds.py DRAFTER [--drafts 4] [--branches 8] [--depth 5] \
        [--siblings 4] [--temp 0.7] [--top-p 0.95] [--top-k 40]

Milliseconds from the beginning of a round until each depth is there, medians; with --profile also
where the host's time went.
"""

import argparse
import cProfile
import pstats
import statistics
import time
from pathlib import Path

from protocol.decoding.token_tree import read_tree
from protocol.messages import Sampling
from services.drafter.backends.base import RoundOptions
from services.drafter.backends.mlx import MlxBackend

ROUNDS = 40


class Rounds:
    """One sequence that is drafted for."""

    def __init__(self, given: argparse.Namespace) -> None:
        self._backend = MlxBackend(given.drafter, 512)
        began = time.perf_counter()
        self._backend.trace()
        print(f"traced in {time.perf_counter() - began:.1f} s", flush=True)
        self._drafts, self._branches, self._depth = given.drafts, given.branches, given.depth
        self._options = RoundOptions(siblings=given.siblings)
        tokens = [1, *range(700, 780)]
        sampling = Sampling(temperature=given.temp, top_p=given.top_p, top_k=given.top_k, seed=1)
        for _ in self._backend.open(1, tokens, sampling):
            pass
        self._committed, self._chain = len(tokens), [900]

    def run(self, *, hits: bool) -> list[float]:
        """One round; the next one's chain was its first branch behind all of the chain, or not."""
        began = time.perf_counter()
        share = max(1, self._branches // len(self._chain))
        fan_out = [share] * len(self._chain)
        tree = read_tree(self._chain, [])
        found, branch, place = list[float](), list[int](), 0
        row = len(self._chain) - 1
        for layer in self._backend.prepare(1, tree, fan_out, self._depth, self._options):
            if layer is None:
                continue
            found.append(1e3 * (time.perf_counter() - began))
            if not branch:
                place = next(at for at, root in enumerate(layer.outcomes) if root.accepted == row)
                branch.append(layer.outcomes[place].bonus)
            place = layer.parents.index(place) if layer.parents else place
            branch.append(layer.tokens[place])
        self._backend.commit(1, self._committed, self._chain)
        self._committed += len(self._chain)
        self._chain = branch[: 1 + self._drafts] if hits else [branch[0] + 1]
        return found


def main() -> None:
    """Print a line for hits and one for misses."""
    parser = argparse.ArgumentParser()
    parser.add_argument("drafter", type=Path)
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument("--branches", type=int, default=8)
    parser.add_argument("--depth", type=int, default=5)
    parser.add_argument("--siblings", type=int, default=0)
    parser.add_argument("--temp", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--profile", action="store_true")
    given = parser.parse_args()
    rounds = Rounds(given)
    for hits in (True, False):
        for _ in range(4):
            rounds.run(hits=hits)
        profile = cProfile.Profile()
        if given.profile:
            profile.enable()
        times = [rounds.run(hits=hits) for _ in range(ROUNDS)]
        profile.disable()
        medians = [f"{statistics.median(depth):.2f}" for depth in zip(*times, strict=True)]
        print("hits" if hits else "misses", *medians)
        if given.profile:
            pstats.Stats(profile).sort_stats("tottime").print_stats(28)


if __name__ == "__main__":
    main()
