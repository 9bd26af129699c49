"""Models of the two services: they answer the product's messages after simulated time.

The drafter works like `services.runtime.loop` and `services.drafter.drafter`: one message after the
other; between two steps it checks for new messages, and a newer one ends the current work.
"""

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
from msgspec.structs import replace

from orchestrator.simulation.branch import BranchModel
from orchestrator.simulation.event_queue import EventQueue
from orchestrator.simulation.latency_curve import curve
from orchestrator.simulation.oracle import Oracle
from orchestrator.simulation.scenario import Device
from protocol.decoding.token_tree import TokenTree, read_tree
from protocol.messages import (
    DraftNow,
    DraftTree,
    Extend,
    Prepare,
    Revoke,
    VerificationOutcome,
    Verify,
)

_Step = tuple[float, DraftTree]
"""Milliseconds, and the resulting message."""


class Noise:
    """Random factors around 1 for times; drawn in blocks, since single draws are slow."""

    def __init__(self, spread: float, seed: int) -> None:
        self._spread = spread
        self._random = np.random.default_rng(seed)
        self._drawn: list[float] = []

    def factor(self) -> float:
        """Return a positive factor with median 1."""
        if not self._spread:
            return 1.0
        if not self._drawn:
            self._drawn = np.exp(self._spread * self._random.standard_normal(1024)).tolist()
        return self._drawn.pop()


class DrafterModel:
    """Prepares trees and drafts; interruptible between two steps."""

    def __init__(
        self,
        events: EventQueue,
        device: Device,
        oracle: Oracle,
        noise: Noise,
        *,
        send: Callable[[DraftTree], None],
    ) -> None:
        self._events, self._oracle, self._noise, self._send = events, oracle, noise, send
        self._cost, self._start_ms = curve(device.t_draft), device.draft_start
        self._inbox: deque[Prepare | DraftNow] = deque()
        self._work: Iterator[_Step] | None = None
        self._worked_ms, self._since = 0.0, 0.0
        self._tree_depths = 0
        self._roots: set[int] = set()
        self.on_idle: Callable[[], None] = lambda: None

    @property
    def idle(self) -> bool:
        """True while it waits for messages."""
        return self._work is None

    @property
    def worked_ms(self) -> float:
        """Time spent working so far."""
        return self._worked_ms + (0.0 if self.idle else self._events.now - self._since)

    def receive(self, message: Prepare | DraftNow) -> None:
        """Handle a message."""
        self._inbox.append(message)
        if self.idle:
            self._next()

    def _next(self) -> None:
        self._work = None
        if not self._inbox:
            self.on_idle()
            return
        message = self._inbox.popleft()
        self._work = (
            self._prepare(message) if isinstance(message, Prepare) else self._draft(message)
        )
        self._step()

    def _step(self) -> None:
        step = next(self._work, None) if self._work is not None else None
        if step is None:
            self._next()
            return
        self._since = self._events.now
        self._events.after(step[0], partial(self._on_step_done, step[1]))

    def _on_step_done(self, tree: DraftTree) -> None:
        self._worked_ms += self._events.now - self._since
        self._since = self._events.now
        self._send(tree)
        if self._inbox:
            self._next()
        else:
            self._step()

    def _time(self, branches: int) -> float:
        return self._cost.of(branches) * self._noise.factor()

    def _feed(self, tree: TokenTree) -> float:
        """Return the time to process the verified tokens: siblings, and the last token of the
        best chain unless that was a branch, grown deeper; all in one pass.
        """
        adopted = tree.tokens[0] in self._roots and self._tree_depths > max(tree.depths)
        self._roots, self._tree_depths = set(), 0
        rows = len(tree) - tree.stem + (0 if adopted else 1)
        return self._time(rows) if rows else 0.0

    def _prepare(self, message: Prepare) -> Iterator[_Step]:
        tree, oracle = read_tree(message.nodes, message.parents), self._oracle
        pending = message.base + len(message.tokens)
        milliseconds = self._start_ms + self._feed(tree)
        roots: list[tuple[int, int]] = []
        for row, count in enumerate(message.fan_out[: len(tree)]):
            position = pending + tree.depths[row] + 1
            bonuses = oracle.bonuses(position, count, rejected=len(tree.children[row]))
            roots += [(row, bonus) for bonus in bonuses]
        self._roots = {bonus for _, bonus in roots}
        row, bonus = oracle.outcome(pending, tree)
        coming = roots.index((row, bonus)) if (row, bonus) in roots else None
        branch = BranchModel(oracle, pending + tree.depths[row] + 2, message.siblings, coming)
        for depth in range(1, message.depth + 1 if roots else 1):
            milliseconds += self._time(len(roots))
            self._tree_depths = depth
            layer = branch.grow(len(roots))
            yield (
                milliseconds,
                DraftTree(
                    sequence=message.sequence,
                    round=message.round,
                    depth=depth,
                    outcomes=roots if depth == 1 else [],
                    draft_ms=milliseconds,
                    last=depth == message.depth,
                    **layer,
                ),
            )
            milliseconds = 0.0

    def _draft(self, message: DraftNow) -> Iterator[_Step]:
        self._roots = set()
        first = message.base + len(message.tokens) + 1
        branch = BranchModel(self._oracle, first, message.siblings, 0)
        milliseconds = self._start_ms
        for depth in range(1, message.count + 1):
            milliseconds += self._time(1)
            layer = branch.grow(1)
            yield (
                milliseconds,
                DraftTree(
                    sequence=message.sequence,
                    round=message.round,
                    depth=depth,
                    outcomes=[(message.accepted, message.pending)] if depth == 1 else [],
                    draft_ms=milliseconds,
                    last=depth == message.count,
                    **layer,
                ),
            )
            milliseconds = 0.0


class VerifierModel:
    """Verifies trees against the script, slower while the drafter works if they contend."""

    def __init__(
        self,
        events: EventQueue,
        device: Device,
        oracle: Oracle,
        noise: Noise,
        *,
        drafter: DrafterModel,
        send: Callable[[VerificationOutcome], None],
    ) -> None:
        self._events, self._device, self._oracle, self._noise = events, device, oracle, noise
        self._drafter, self._send = drafter, send
        self._cost = curve(device.t_verify)
        self._idle_since = 0.0
        self._granted = 0

    def receive(self, message: Verify | Extend | Revoke) -> None:
        """Start verifying, which only an idle verifier is asked for; or change the free run."""
        match message:
            case Verify():
                self._granted = message.granted
                self._start(message)
            case Extend():
                self._granted += message.granted
            case Revoke():
                self._granted = 0

    def _start(self, message: Verify) -> None:
        alone_ms = self._time(len(message.nodes))
        started, worked = self._events.now, self._drafter.worked_ms
        self._events.after(alone_ms, partial(self._check, message, started, worked, alone_ms))

    def _time(self, tokens: int) -> float:
        own_ms = self._cost.of(tokens) + self._device.exchange_ms(tokens)
        return own_ms * self._noise.factor()

    def _check(self, message: Verify, started: float, worked: float, alone_ms: float) -> None:
        """End the verification, unless the drafter slowed it down."""
        slowed = self._device.contention / (1.0 + self._device.contention)
        lost_ms = slowed * (self._drafter.worked_ms - worked)
        missing_ms = alone_ms + lost_ms - (self._events.now - started)
        if missing_ms > 1e-6 * alone_ms:
            self._events.after(missing_ms, partial(self._check, message, started, worked, alone_ms))
            return
        outcome = self._outcome(message, started)
        self._idle_since = self._events.now
        if outcome.goes_on:
            self._granted -= 1
            following = {"position": message.position + 1, "nodes": [outcome.bonus]}
            self._start(replace(message, round=message.round + 1, **following))
        if self._device.whole_tree and not self._drafter.idle:
            self._drafter.on_idle = partial(self._release, outcome)
        else:
            self._send(outcome)

    def _release(self, outcome: VerificationOutcome) -> None:
        self._drafter.on_idle = lambda: None
        self._send(outcome)

    def _outcome(self, message: Verify, started: float) -> VerificationOutcome:
        tree = read_tree(message.nodes, message.parents)
        row, bonus = self._oracle.outcome(message.position, tree)
        return VerificationOutcome(
            sequence=message.sequence,
            round=message.round,
            accepted=tree.depths[row],
            bonus=bonus,
            goes_on=self._granted > 0,
            node=row,
            verify_ms=self._events.now - started,
            idle_ms=started - self._idle_since,
        )
