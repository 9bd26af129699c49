"""The MLX backend on a GPU of its own: each round is launched before its branches are known.

Whatever the outcome of a verification, the next round starts on the device at once
(`drafter.backends.mlx_rounds`): with the branches after a prepared outcome; or with the tokens that
are missing, and the branches, or the draft, after these. What a round does not suit, as trees and
long texts, goes the usual way.
"""

import itertools
import logging
from collections.abc import Generator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from protocol.decoding.token_tree import TokenTree, read_tree
from protocol.messages import Sampling, Tokens
from services.drafter.backends.base import (
    DEFAULT_ROUND_OPTIONS,
    Outcome,
    RoundOptions,
    TreeLayer,
)
from services.drafter.backends.growth import Tip, begin_tips, lay_out
from services.drafter.backends.mlx import MlxBackend
from services.drafter.backends.mlx_ahead import read_layer
from services.drafter.backends.mlx_round_trunk import RoundTree, RoundTrunk
from services.drafter.backends.mlx_rounds import (
    PrelaunchedRound,
    RoundPrelauncher,
    describe_tips,
    describe_tokens,
)
from services.drafter.backends.mlx_tree import Bud, Trunk
from services.engine.batch import Shape
from services.kernels.cuda.branch_doorbell import open_branch_doorbell
from services.kv.cache import KVStore
from services.mlx.selftest import is_close
from services.runtime.preparation import Steps
from services.runtime.sequence_table import TRIAL_SEQUENCE

_log = logging.getLogger(__name__)

_WHAT = "rounds launched before their branches are known"
_TRIAL_PROMPT = list(range(1, 25))
_TRIAL_TURNS = 3
_TRIAL_SAMPLINGS = (Sampling(), Sampling(temperature=1.0), Sampling(temperature=1.0, top_p=0.9))


class _Chain(NamedTuple):
    """A chain, and what is grown after it."""

    tree: TokenTree
    fan: list[int]
    """Outcomes to prepare after each row, fewer than are ranked."""
    depth: int
    options: RoundOptions


class PrelaunchingBackend(MlxBackend):
    """Prelaunches rounds; its interface is that of `MlxBackend`."""

    _trunk_type = RoundTrunk
    rounds: RoundPrelauncher | None = None
    """None: nothing is launched before it is known."""
    _branches = 8
    """Number in the last round that had some."""

    def trace(self) -> Steps[None]:
        """Trace passes of common shapes; then try rounds."""
        yield from super().trace()
        yield from self.try_rounds()

    def try_rounds(self) -> Steps[None]:
        """Launch rounds before their branches are known, if that works here.

        MLX must have been told to build one graph of everything that is submitted at once.
        """
        self._runner.one_graph = self._filler.one_graph = True
        ahead = self.ahead
        bell = open_branch_doorbell() if ahead is not None and ahead.traced is not None else None
        if bell is None or ahead is None or ahead.traced is None:
            return
        rounds = RoundPrelauncher(ahead.traced.forward, bell, ahead.ids)
        try:
            works = yield from self._are_right(rounds, sorted(ahead.traced.forward.shapes))
        # Faults of a device or a driver must show here, and not in an answer.
        except Exception as error:  # noqa: BLE001
            _log.warning("%s: %s: not used", _WHAT, error)
            works = False
        rounds.forget()
        self.rounds = rounds if works else None
        self.close(TRIAL_SEQUENCE)

    # ------------------------------------------------------------ rounds

    def prepare(
        self,
        sequence: int,
        tree: TokenTree,
        fan_out: list[int],
        depth: int,
        options: RoundOptions = DEFAULT_ROUND_OPTIONS,
    ) -> Generator[TreeLayer | None]:
        """Make one round of the missing tokens of a chain, and the branches after it."""
        trunk, rounds = self._trunk(sequence), self.rounds
        fan = fan_out[: len(tree)]
        grown = None
        if rounds is not None and depth and any(fan) and tree.is_chain and self._goes_ahead(trunk):
            chain = _Chain(tree, [min(count, rounds.width - 1) for count in fan], depth, options)
            desired = trunk.sequence[: trunk.committed] + tree.tokens
            keep = self._keep(trunk, desired, trunk.committed, 1)
            if keep == len(desired):
                grown = self._grow_known(rounds, trunk, chain)
            else:
                trunk.cut(min(keep, trunk.committed))
                grown = self._grow_missing(rounds, trunk, chain, desired[len(trunk.tokens) :])
        if grown is None:
            self._clear_way(trunk)
            trunk.forget_rounds()
            grown = super().prepare(sequence, tree, fan_out, depth, options)
        yield from grown

    def draft(
        self, sequence: int, pending: int, count: int, options: RoundOptions = DEFAULT_ROUND_OPTIONS
    ) -> Generator[TreeLayer | None]:
        """Make one round of the missing tokens and the draft."""
        trunk, rounds = self._trunk(sequence), self.rounds
        begun, tokens = None, list[int]()
        if rounds is not None and count and not options.siblings and self._goes_ahead(trunk):
            desired = [*trunk.sequence, pending]
            trunk.cut(min(self._keep(trunk, desired, len(desired), 1), trunk.committed))
            trunk.tree, tokens = None, desired[len(trunk.tokens) :]
            after_last = np.array([[len(tokens) - 1], [0], [-1]])
            describe = partial(describe_tokens, trunk, tokens, after_last, options.shift)
            begun = rounds.start(trunk, len(tokens), describe)
        if rounds is None or begun is None:
            self._clear_way(trunk)
            trunk.forget_rounds()
            yield from super().draft(sequence, pending, count, options)
            return
        yield from self._draft_round(rounds, trunk, tokens, count, begun)

    def _grow_known(
        self, rounds: RoundPrelauncher, trunk: RoundTrunk, chain: _Chain
    ) -> Generator[TreeLayer | None] | None:
        """Start a round over the branches after a chain; None if that is impossible."""
        tree, options = chain.tree, chain.options
        trunk.cut(trunk.committed + len(tree))
        roots = trunk.find_outcomes(tree, chain.fan, options.shift)
        tips = _begin_tips(roots, trunk, tree)
        describe = partial(describe_tips, trunk, tips, options.shift)
        begun = rounds.start(trunk, len(tips), lambda _: describe())
        if begun is None:
            return None
        return self._tell_branches(rounds, trunk, chain, begun, roots=roots)

    def _grow_missing(
        self, rounds: RoundPrelauncher, trunk: RoundTrunk, chain: _Chain, tokens: Tokens
    ) -> Generator[TreeLayer | None] | None:
        """Start a round over missing tokens, the last of which are a chain, and the branches.

        Returns None if that is impossible.
        """
        tree, first = chain.tree, len(tokens) - len(chain.tree)
        forks = [
            (first + row, rank, next(iter(tree.children[row]), -1))
            for row, count in enumerate(chain.fan)
            for rank in range(count)
        ]
        describe = partial(describe_tokens, trunk, tokens, np.array(forks).T, chain.options.shift)
        begun = rounds.start(trunk, max(len(tokens), len(forks)), describe)
        if begun is None:
            return None
        return self._tell_branches(rounds, trunk, chain, begun, tokens=tokens)

    def _tell_branches(
        self,
        rounds: RoundPrelauncher,
        trunk: RoundTrunk,
        chain: _Chain,
        begun: PrelaunchedRound,
        *,
        roots: list[Outcome] | None = None,
        tokens: Tokens | None = None,
    ) -> Generator[TreeLayer | None]:
        """Tell the depths of a round, of these roots or after these tokens."""
        if tokens is not None:
            trunk.append(tokens, begun.choices(0), begun.start)
        tree = trunk.tree = RoundTree(trunk.committed, chain.tree.tokens)
        self._branches = sum(chain.fan)
        if rounds.has_missed(begun):
            trunk.tree = None
            trunk.cut(len(trunk.tokens) - len(tokens or []))
            return
        if roots is None:
            roots = trunk.find_outcomes(chain.tree, chain.fan, chain.options.shift)
        tips = _begin_tips(roots, trunk, chain.tree)
        first = 0 if tokens is None else 1
        last = min(first + chain.depth, rounds.passes - 1)
        for at in range(first, last + 1):
            place, choices = len(tree.fed), begun.choices(at)
            buds = [Bud(tip.token, tip.parent, tip.fork) for tip in tips]
            tree.add_pass(buds, choices, begun.start + at * begun.rows)
            if at == last:
                rounds.keep(choices)  # after a hit they say which bonus tokens are likely
                break
            found = choices.ids_and_shares[:, : len(tips), : 1 + chain.options.siblings]
            layer, tips = read_layer(roots, tips, found, place, chain.options)
            yield layer
        # The host takes longer to build a round than the device to compute one: depths come first.
        rounds.launch(trunk, self._branches, begun)

    def _draft_round(
        self,
        rounds: RoundPrelauncher,
        trunk: RoundTrunk,
        tokens: Tokens,
        count: int,
        begun: PrelaunchedRound,
    ) -> Generator[TreeLayer]:
        """Tell the tokens after these, over which the first pass of a round runs."""
        if rounds.has_missed(begun):
            return
        choices, row = begun.choices(0), len(tokens) - 1
        trunk.append(tokens, choices, begun.start)
        for at in range(1, min(count, rounds.passes - 1) + 1):
            token, share = choices.ids_and_shares[:, row, 0].tolist()
            choices, row = begun.choices(at), 0
            rounds.keep(choices)
            trunk.append([int(token)], choices, begun.start + at * begun.rows)
            yield TreeLayer([], [int(token)], [share])
        rounds.launch(trunk, max(self._branches, begun.rows), begun)

    # ------------------------------------------------------------ other work

    def open(self, sequence: int, tokens: Tokens, sampling: Sampling) -> Generator[None]:
        """Prefill in chunks, for which the round that waits is called off."""
        self._clear_way(*(self._trunk(number) for number in self._sequences))
        for _ in super().open(sequence, tokens, sampling):
            yield
            self._clear_way()

    def close(self, sequence: int) -> None:
        """Free the KV, except what another sequence may fork."""
        if sequence in self._sequences:
            self._clear_way(self._trunk(sequence))
        super().close(sequence)

    def _feed(
        self, trunk: Trunk, base: int, tokens: Tokens, rows: int, width: int = 1
    ) -> Generator[None]:
        """Feed tokens without a round."""
        self._clear_way(trunk)
        yield from super()._feed(trunk, base, tokens, rows, width)

    def _adopt(self, trunk: Trunk, desired: Tokens, keep: int, first_row: int, width: int) -> int:
        """Adopt a path; if a round waits, the path is moved only after the round has seen it."""
        tree = trunk.tree
        if tree is None or keep >= len(desired):
            return keep
        if not isinstance(trunk, RoundTrunk) or not isinstance(tree, RoundTree):
            self._clear_way(trunk)
            return super()._adopt(trunk, desired, keep, first_row, width)
        path = tree.follow(desired, keep)
        if not path:
            trunk.tree = None
            return keep
        trunk.cut(keep)
        trunk.scattered += [tree.slot(index) for index in path]
        trunk.tokens = desired[: keep + len(path)]
        trunk.rankings |= {at: tree.rankings[i] for at, i in enumerate(path, start=keep)}
        if self.rounds is None or not self.rounds.is_for(trunk):
            trunk.settle()
        tree.lost = max(tree.lost, keep + len(path))
        return keep + len(path)

    def _clear_way(self, *trunks: Trunk) -> None:
        """Call off the round that waits, which keeps the device; put these tokens in order."""
        if self.rounds is not None:
            self.rounds.call_off()
        for trunk in trunks:
            if isinstance(trunk, RoundTrunk):
                trunk.settle()

    def _trunk(self, sequence: int) -> RoundTrunk:
        trunk = self._sequences[sequence]
        if not isinstance(trunk, RoundTrunk):
            raise TypeError("the trunk does not belong to this backend")
        return trunk

    # ------------------------------------------------------------ before use

    def _are_right(self, rounds: RoundPrelauncher, shapes: Sequence[Shape]) -> Steps[bool]:
        """Return True if rounds find what awaited passes do; all graphs are built meanwhile."""
        if not (yield from self._fit_length(rounds, shapes[-1])):
            return False
        for shape, sampling in itertools.product(shapes, _TRIAL_SAMPLINGS):
            # CUDA builds no graph while a round waits: the first one of a shape may give up.
            usual = ours = dict[tuple[int, ...], float]()
            for _ in range(_TRIAL_TURNS):
                self.rounds = None
                usual, path = self._play(shape, sampling)
                self.rounds = rounds
                ours, _ = self._play(shape, sampling, path)
                yield
            if not is_close(_WHAT, _measure_distance(usual, ours), "round"):
                return False
        return True

    def _fit_length(self, rounds: RoundPrelauncher, shape: Shape) -> Steps[bool]:
        """Limit a round's passes to what does not take too long; False if it always does."""
        self.rounds, times = rounds, []
        for _ in range(_TRIAL_TURNS):
            self._play(shape, Sampling())
            times.append(rounds.finish())
            yield
        round_ms = min(times[1:])
        if not rounds.fit_length(round_ms):
            _log.info("%s: not used, since one takes %.1f ms", _WHAT, round_ms)
            return False
        _log.info("%s: %.1f ms, %d passes", _WHAT, round_ms, rounds.passes)
        return True

    def _play(
        self, shape: Shape, sampling: Sampling, path: Tokens | None = None
    ) -> tuple[dict[tuple[int, ...], float], Tokens]:
        """Play two rounds and a draft; return the shares of tokens, and the first branch's path.

        A share belongs to the part of the game, the outcome and the tokens up to this one.

        Args:
            shape: of the passes; half of the rows are used.
            sampling: of the sequence.
            path: the path to be followed, by default that one.
        """
        sequence, count = TRIAL_SEQUENCE, min(12, -(-shape.rows // 2))
        list(self.open(sequence, _TRIAL_PROMPT, sampling))
        if isinstance(store := self._sequences[sequence].store, KVStore):
            store.widen(shape.slots)
        told = [_tell(self.prepare(sequence, read_tree([5]), [count], 2))]
        path = path or [told[0][0].outcomes[0].bonus, *(layer.tokens[0] for layer in told[0])]
        self.commit(sequence, len(_TRIAL_PROMPT), [5])
        told.append(_tell(self.prepare(sequence, read_tree(path), [count], 2)))
        self.commit(sequence, len(_TRIAL_PROMPT) + 1, path[:2])
        told.append(_tell(self.draft(sequence, path[2], 2)))
        self.close(sequence)
        return _list_shares(told), path


def _list_shares(told: list[list[TreeLayer]]) -> dict[tuple[int, ...], float]:
    shares = dict[tuple[int, ...], float]()
    for part, layers in enumerate(told):
        outcomes = layers[0].outcomes or [Outcome(0, 0)]
        paths: list[tuple[int, ...]] = [(part, *outcome) for outcome in outcomes]
        for layer in layers:
            paths = [(*path, token) for path, token in zip(paths, layer.tokens, strict=True)]
            shares |= zip(paths, layer.confidences, strict=True)
    return shares


def _measure_distance(
    usual: dict[tuple[int, ...], float], ours: dict[tuple[int, ...], float]
) -> float:
    """Return the relative difference of shares; infinite if less than half of them are the same.

    Rounding may exchange tokens that are equally likely, and all that follow them.
    """
    common = [path for path in usual if path in ours]
    if 2 * len(common) < len(usual):
        return float("inf")
    pairs = np.array([(usual[path], ours[path]) for path in common])
    return float(np.linalg.norm(pairs[:, 0] - pairs[:, 1]) / np.linalg.norm(pairs[:, 0]))


def _begin_tips(roots: list[Outcome], trunk: Trunk, tree: TokenTree) -> list[Tip]:
    return begin_tips(roots, lay_out(tree, trunk.committed, held=len(tree), by_depth=False).places)


def _tell(layers: Generator[TreeLayer | None]) -> list[TreeLayer]:
    return [layer for layer in layers if layer is not None]
