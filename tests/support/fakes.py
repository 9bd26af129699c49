"""A fake target and a fake drafter, and a stack that carries out a sequence's actions with them.

The fake target is a function from a prefix to its next token; plain decoding with it is the
truth. The fake drafter guesses, delivers its trees when chance says so, and dies. There is no
process and no clock, and every invariant of the protocol is asserted where it can be seen.
"""

import zlib
from collections.abc import Callable, Iterable, Iterator
from random import Random
from typing import Any

from msgspec.structs import replace

from orchestrator.learning.cost_model import CostModel
from orchestrator.learning.round_observation import RoundObservation
from orchestrator.sequence.draft import Draft
from orchestrator.sequence.planner import Planner
from orchestrator.sequence.sequence import (
    Action,
    Emit,
    Finish,
    Limits,
    Phase,
    Sequence,
    ToDrafter,
    ToVerifier,
)
from orchestrator.telemetry.recorder import Recorder
from protocol.decoding.token_tree import read_tree
from protocol.messages import (
    END_OF_BRANCH,
    CloseSequence,
    DraftNow,
    DraftTree,
    Extend,
    Mode,
    OpenSequence,
    Prepare,
    Revoke,
    Sampling,
    TokenOrigin,
    Tokens,
    VerificationOutcome,
    Verify,
)

VOCABULARY = 7

_DRAFTING: tuple[Mode, ...] = ("sd", "ssd")


def judged(estimates: CostModel | None = None) -> CostModel:
    """Estimates that have measured plain decoding, which is slow; speculation has credit."""
    estimates = estimates or CostModel()
    for mode, estimates.streams in [(mode, streams) for mode in _DRAFTING for streams in (2, 1)]:
        switch = estimates.switch(mode)
        while not (switch is None or switch.speculating):
            switch.observe(1, 1e3, 0.0, speculating=False)
        if switch is not None:
            switch.credit = 6.0
    return estimates


def observed(**changes: Any) -> RoundObservation:
    """A round of a drafter's chain, of which nothing is known but what is given."""
    told: dict[str, Any] = {
        "mode": "ssd",
        "by_hand": False,
        "speculating": True,
        "origin": "hit",
        "confidences": [],
        "accepted": 0,
        "prepared": 0,
        "rank": None,
        "verify_ms": 10.0,
        "idle_ms": None,
    }
    told["is_contended"] = changes.get("speculating", True)
    return RoundObservation(**{**told, **changes})


def chain_of(confidences: Iterable[float]) -> Draft:
    """A chain of these confidences; its tokens are 0, 1, 2, ..."""
    sure = list(confidences)
    return tree_of(sure, range(len(sure)))


def tree_of(confidences: Iterable[float], parents: Iterable[int]) -> Draft:
    """A tree of these parents' rows; its tokens are 0, 1, 2, ..."""
    draft = Draft()
    for token, (confidence, parent) in enumerate(zip(confidences, parents, strict=True)):
        draft.add(token, confidence, parent=parent)
    return draft


def describe(thing: Any) -> Any:
    """All that an object holds, as plain values that can be compared."""
    if isinstance(thing, dict):
        return {key: describe(value) for key, value in thing.items()}
    if isinstance(thing, list | tuple):
        return [describe(value) for value in thing]
    return describe(vars(thing)) if hasattr(thing, "__dict__") else repr(thing)


class Target:
    """A deterministic function from a prefix to its next token."""

    def __init__(self, salt: int) -> None:
        self._salt = salt

    def next(self, prefix: Tokens) -> int:
        return zlib.crc32(bytes([self._salt, *prefix])) % VOCABULARY

    def plain(self, prompt: Tokens, limits: Limits) -> tuple[Tokens, str]:
        """Plain decoding: one token after the other until the answer ends, and why it does."""
        answer: Tokens = []
        while True:
            token = self.next([*prompt, *answer])
            if token in limits.stop_ids:
                return answer, "stop"
            answer.append(token)
            if limits.context_length and len(prompt) + len(answer) >= limits.context_length:
                return answer, "context"
            if len(answer) >= limits.max_tokens:
                return answer, "length"


class FakeVerifier:
    """Keeps the KV's tokens, verifies chains and goes on unasked as the protocol says."""

    def __init__(
        self, target: Target, max_draft: int, random: Random, *, takes_trees: bool, row_ms: float
    ) -> None:
        self._target = target
        self._max_draft = max_draft
        self.takes_trees = takes_trees
        self._row_ms = row_ms
        self._random = random
        self.kv: Tokens | None = None
        self.answers: list[VerificationOutcome] = []
        """On their way."""
        self._granted_in, self._left = 0, 0

    def receive(self, message: OpenSequence | Verify | Revoke | Extend | CloseSequence) -> None:
        match message:
            case OpenSequence():
                self.kv = list(message.tokens)
            case CloseSequence():
                self.kv = None
            case Verify():
                assert not any(answer.goes_on for answer in self.answers)
                self._granted_in, self._left = message.round, message.granted
                self.answers = [self._announce(message, self._verify(message))]
            case Revoke():
                assert message.round <= self._granted_in
                self._left = 0 if message.round == self._granted_in else self._left
            case Extend():
                assert message.round == self._granted_in
                self._left += message.granted

    def take(self) -> VerificationOutcome | None:
        """The next answer, if there is one; what follows unasked may be on its way already."""
        if not self.answers:
            return None
        first = self.answers.pop(0)
        last = [first, *self.answers][-1]
        while self.kv is not None and last.goes_on and len(self.answers) < 3:
            message = Verify(
                sequence=last.sequence,
                round=last.round + 1,
                position=len(self.kv),
                nodes=[last.bonus],
            )
            last = self._announce(message, self._verify(message))
            self.answers.append(last)
            if self._random.random() < 0.7:
                break
        return first

    def _announce(self, message: Verify, outcome: VerificationOutcome) -> VerificationOutcome:
        goes_on = self._left > 0 and outcome.bonus not in message.stop_ids
        self._left -= goes_on
        return replace(outcome, goes_on=goes_on)

    def _verify(self, message: Verify) -> VerificationOutcome:
        assert self.kv is not None
        assert len(self.kv) == message.position
        assert 1 <= len(message.nodes) <= 1 + self._max_draft
        assert all(0 <= token < VOCABULARY for token in message.nodes)
        tree = read_tree(message.nodes, message.parents)
        assert self.takes_trees or tree.is_chain
        chosen = [self._target.next([*self.kv, *tree.tokens_to(row)]) for row in range(len(tree))]
        path = tree.walk(chosen)
        row, accepted = path[-1], len(path) - 1
        self.kv += tree.tokens_to(row)
        return VerificationOutcome(
            sequence=message.sequence,
            round=message.round,
            accepted=accepted,
            bonus=chosen[row],
            node=None if tree.is_chain else row,
            verify_ms=10.0 + self._row_ms * len(tree),
            idle_ms=1.0,
        )


class FakeDrafter:
    """Guesses the target's tokens, right with probability `skill`; news ends old work."""

    def __init__(
        self,
        target: Target,
        skill: float,
        context: int,
        random: Random,
        draft_ms: float,
        *,
        takes_trees: bool,
    ) -> None:
        self._target = target
        self._skill = skill
        self._random = random
        self._context = context
        self._draft_ms = draft_ms
        self.takes_trees = takes_trees
        self.known: Tokens | None = None
        self._work: Iterator[DraftTree] = iter(())

    def receive(self, message: OpenSequence | Prepare | DraftNow | CloseSequence) -> None:
        self._work = iter(())
        match message:
            case OpenSequence():
                self.known = list(message.tokens)
            case CloseSequence():
                self.known = None
            case Prepare():
                assert len(message.fan_out) == len(message.nodes)
                assert self.takes_trees or not (message.parents or message.siblings)
                self._commit(message, max(read_tree(message.nodes, message.parents).depths) + 1)
                self._work = self._tree(message)
            case DraftNow():
                assert self.takes_trees or not message.siblings
                self._commit(message, 1)
                self._work = self._draft(message)

    def work(self) -> DraftTree | None:
        """One depth more, if there is one."""
        return next(self._work, None)

    def _commit(self, message: Prepare | DraftNow, chain: int) -> None:
        assert self.known is not None
        assert message.base <= len(self.known)
        self.known = [*self.known[: message.base], *message.tokens]
        depth = message.depth if isinstance(message, Prepare) else message.count
        assert not 0 < self._context < len(self.known) + chain + depth

    def _guess(self, prefix: Tokens) -> int:
        right = self._target.next(prefix)
        if self._random.random() < self._skill:
            return right
        return (right + self._random.randrange(1, VOCABULARY)) % VOCABULARY

    def _candidates(self, prefix: Tokens, wanted: int, rejected: Iterable[int] = ()) -> Tokens:
        """The guess first, then others; never a token that was rejected."""
        others = self._random.sample(range(VOCABULARY), VOCABULARY)
        ranked = dict.fromkeys([self._guess(prefix), *others])
        return [token for token in ranked if token not in rejected][:wanted]

    def _tree(self, message: Prepare) -> Iterator[DraftTree]:
        known, verified = self.known or [], read_tree(message.nodes, message.parents)
        outcomes: list[tuple[int, int]] = []
        for row, wanted in enumerate(message.fan_out):
            prefix, rejected = [*known, *verified.tokens_to(row)], verified.children[row]
            outcomes += [(row, t) for t in self._candidates(prefix, wanted, rejected)]
        branches = [[*known, *verified.tokens_to(row), bonus] for row, bonus in outcomes]
        if message.siblings:
            yield from self._branch(message, outcomes, branches, message.depth)
            return
        for depth in range(1, message.depth + 1):
            tokens = [self._next_or_end(branch) for branch in branches]
            for branch, token in zip(branches, tokens, strict=True):
                branch.append(max(token, 0))
            yield self._layer(message, depth, outcomes, tokens, last=depth == message.depth)

    def _branch(
        self,
        message: Prepare | DraftNow,
        outcomes: list[tuple[int, int]],
        ends: list[Tokens],
        depths: int,
    ) -> Iterator[DraftTree]:
        """Trees: each end gets its best candidates, unless it has none; the best one goes on."""
        for depth in range(1, depths + 1):
            parents: list[int] = []
            tokens: Tokens = []
            following: list[Tokens] = []
            for index, end in enumerate(ends):
                ended = end == [] or self._next_or_end(end) == END_OF_BRANCH
                found = [] if ended else self._candidates(end, 1 + message.siblings)
                parents += [index] * len(found)
                tokens += found
                for place, token in enumerate(found):
                    following.append([*end, token] if place == 0 else [])
            ends = following
            last = depth == depths or not tokens
            yield self._layer(message, depth, outcomes, tokens, last=last, parents=parents)
            if last:
                return

    def _draft(self, message: DraftNow) -> Iterator[DraftTree]:
        branch = [*(self.known or []), message.pending]
        outcome = [(message.accepted, message.pending)]
        if message.siblings:
            yield from self._branch(message, outcome, [branch], message.count)
            return
        for depth in range(1, message.count + 1):
            token = self._next_or_end(branch)
            branch.append(max(token, 0))
            last = depth == message.count or token == END_OF_BRANCH
            yield self._layer(message, depth, outcome, [token], last=last)
            if last:
                return

    def _next_or_end(self, branch: Tokens) -> int:
        unsure = self._skill < 1.0 and self._random.random() < 0.05
        return END_OF_BRANCH if unsure else self._guess(branch)

    def _layer(
        self,
        message: Prepare | DraftNow,
        depth: int,
        outcomes: list[tuple[int, int]],
        tokens: Tokens,
        *,
        last: bool,
        parents: Iterable[int] = (),
    ) -> DraftTree:
        return DraftTree(
            sequence=message.sequence,
            round=message.round,
            depth=depth,
            outcomes=outcomes if depth == 1 else [],
            tokens=tokens,
            parents=list(parents),
            confidences=[1.0 if self._skill == 1.0 else self._random.random() for _ in tokens],
            draft_ms=self._draft_ms,
            last=last,
        )


class Stack:
    """One sequence, its two services, and the wires between them."""

    def __init__(
        self,
        *,
        mode: Mode,
        target: Target,
        prompt: Tokens,
        limits: Limits,
        num_draft_tokens: int = 0,
        budget: int = 0,
        skill: float = 1.0,
        seed: int = 0,
        max_draft: int = 64,
        drafter_context: int = 0,
        draft_ms: float = 1.0,
        estimates: CostModel | None = None,
        sampling: Sampling | None = None,
        trees: bool = False,
        tree_nodes: int = 0,
        row_ms: float = 1.0,
    ) -> None:
        self.trees = trees
        """Whether new services take trees."""
        self._row_ms = row_ms
        self.random = Random(seed)  # noqa: S311  # no secret depends on it
        self.target = target
        self.limits = limits
        self.prompt = prompt
        self.truth, self.ending = target.plain(prompt, limits)
        self._skill = skill
        self._max_draft = max_draft
        self._drafter_context = drafter_context
        self._draft_ms = draft_ms
        self.verifier: FakeVerifier | None = None
        self.drafter: FakeDrafter | None = None
        self.wire: list[DraftTree] = []
        """Trees on their way."""
        self.past: list[DraftTree] = []
        self.past_outcomes: list[VerificationOutcome] = []
        self.actions: list[Action] = []
        self.now = 0.0
        self.estimates = estimates or judged()
        self.sequence = Sequence(
            number=1,
            prompt=prompt,
            sampling=sampling or Sampling(),
            limits=limits,
            planner=Planner(mode, self.estimates, num_draft_tokens, budget, tree_nodes=tree_nodes),
            recorder=Recorder(0.0),
        )

    # ------------------------------------------------------------ carrying out actions

    def do(self, actions: Iterable[Action]) -> None:
        """Carry out each action as it comes, as the pipeline does, and check it."""
        for action in actions:
            self.actions.append(action)
            match action:
                case ToVerifier(message):
                    self._check_verify(message)
                    if self.verifier is not None:
                        self.verifier.receive(message)
                case ToDrafter(message) if self.drafter is not None:
                    self.drafter.receive(message)
                    self._check_drafter(message)
                case Emit(tokens, origins):
                    assert len(tokens) == len(origins)

    def _check_verify(
        self, message: OpenSequence | Verify | Revoke | Extend | CloseSequence
    ) -> None:
        tokens = self.sequence.tokens
        assert [*self.prompt, *self.truth][: len(tokens)] == tokens
        if isinstance(message, Verify):
            assert len(tokens) - 1 == message.position
            assert tokens[-1] == message.nodes[0]
            longest = max(read_tree(message.nodes, message.parents).depths) + 1
            assert longest <= len(self.prompt) + self.limits.max_tokens - len(tokens)
            assert longest <= (self.limits.context_length or 10**9) - len(tokens)
        if isinstance(message, OpenSequence):
            assert tokens[:-1] == message.tokens

    def _check_drafter(self, message: OpenSequence | Prepare | DraftNow | CloseSequence) -> None:
        assert self.drafter is not None
        if isinstance(message, CloseSequence):
            return
        tokens = self.sequence.tokens
        assert tokens[:-1] == self.drafter.known
        if isinstance(message, Prepare):
            assert tokens[-1] == message.nodes[0]
        if isinstance(message, DraftNow):
            assert tokens[-1] == message.pending
            room = len(self.prompt) + self.limits.max_tokens - len(tokens)
            space = (self.limits.context_length or 10**9) - len(tokens)
            assert message.count < min(room, space)

    # ------------------------------------------------------------ what may happen

    def verifier_comes(self) -> None:
        self.verifier = FakeVerifier(
            self.target,
            self._max_draft,
            self.random,
            takes_trees=self.trees,
            row_ms=self._row_ms,
        )
        self.do(self.sequence.on_verifier_up(self._max_draft, takes_trees=self.trees))

    def verifier_dies(self) -> None:
        """It is gone, and the orchestrator knows."""
        self.verifier = None
        self.sequence.on_verifier_lost()

    def verifier_vanishes(self) -> None:
        """It is gone, and nobody has noticed yet."""
        self.verifier = None

    def drafter_comes(self) -> None:
        """A new one shakes hands; the pipeline first takes leave of the old one."""
        self.do(self.sequence.on_drafter_lost("drafter_swapped"))
        # Another one may be of a foreign kind, which knows chains only.
        takes_trees = self.trees and (self.drafter is None or self.random.random() < 0.7)
        self.drafter = FakeDrafter(
            self.target,
            self._skill,
            self._drafter_context,
            self.random,
            self._draft_ms,
            takes_trees=takes_trees,
        )
        self.do(self.sequence.on_drafter_up(self._drafter_context, takes_trees=takes_trees))
        self.sequence.on_drafter_filled()

    def drafter_dies(self) -> None:
        """It is gone, and the orchestrator knows; what it sent may still be on its way."""
        self.drafter = None
        self.do(self.sequence.on_drafter_lost("drafter_died"))

    def drafter_vanishes(self) -> None:
        """It is gone, and nobody has noticed yet."""
        self.drafter = None

    def drafter_works(self) -> bool:
        """The drafter sends one depth more; False if it has nothing to do."""
        tree = self.drafter.work() if self.drafter is not None else None
        if tree is not None:
            self.wire.append(tree)
            self.past.append(tree)
        return tree is not None

    def tree_arrives(self) -> None:
        if self.wire:
            self.do(self.sequence.on_tree(self.wire.pop(0), self.now))

    def tree_overtakes(self) -> None:
        if self.wire:
            self.do(self.sequence.on_tree(self.wire.pop(), self.now))

    def tree_is_lost(self) -> None:
        if self.wire:
            self.wire.pop(self.random.randrange(len(self.wire)))

    def tree_comes_again(self) -> None:
        if self.past:
            self.do(self.sequence.on_tree(self.random.choice(self.past), self.now))

    def outcome_arrives(self) -> bool:
        """The verification ends; False if there is none."""
        outcome = self.verifier.take() if self.verifier is not None else None
        if outcome is None:
            return False
        self.past_outcomes.append(outcome)
        self.now += 1.0
        self._outcome(outcome)
        return True

    def outcome_comes_again(self) -> None:
        if self.past_outcomes:
            self._outcome(self.random.choice(self.past_outcomes))

    def _outcome(self, outcome: VerificationOutcome) -> None:
        """The target does not wait for what the drafter is told, which ends with the answer."""
        decided = self.sequence.decide(outcome, self.now)
        assert not any(map(_prepares, decided))
        self.do(decided)
        recorded = self.sequence.record(self.now)
        if any(isinstance(action, Finish) for action in recorded):
            assert not any(map(_prepares, recorded))
        self.do(recorded)

    def patience_ends(self) -> None:
        self.do(self.sequence.on_draft_late())

    # ------------------------------------------------------------ whole runs

    def calm_round(self) -> None:
        """The drafter does all it can, then the verification ends."""
        while self.wire or self.drafter_works():
            self.tree_arrives()
        if not self.outcome_arrives():
            self.patience_ends()

    def calm(self, patience: float = 1.0) -> "Stack":
        """Run to the end with services that stay; returns itself.

        With probability `patience` the drafter sends its next depth before a verification ends.
        """
        steps = 0
        while self.sequence.phase is not Phase.FINISHED:
            steps += 1
            assert steps < 20_000
            if self.wire:
                self.tree_arrives()
                continue
            waits = self.sequence.phase is Phase.DRAFTING
            if (waits or self.random.random() < patience) and self.drafter_works():
                continue
            if self.outcome_arrives():
                continue
            if waits:
                self.patience_ends()
            else:
                self.verifier_comes()
        return self

    def chaos(self, steps: int) -> None:
        """Anything happens, in any order."""
        often: list[Callable[[], object]] = [
            self.drafter_works,
            self.drafter_works,
            self.tree_arrives,
            self.tree_arrives,
            self.outcome_arrives,
        ]
        seldom: list[Callable[[], object]] = [
            self.tree_overtakes,
            self.tree_is_lost,
            self.tree_comes_again,
            self.outcome_comes_again,
            self.patience_ends,
            self.verifier_comes,
            self.verifier_dies,
            self.verifier_vanishes,
            self.drafter_comes,
            self.drafter_comes,
            self.drafter_dies,
            self.drafter_vanishes,
        ]
        for _ in range(steps):
            self.random.choice(seldom if self.random.random() < 0.3 else often)()

    @property
    def emitted(self) -> Tokens:
        return [t for action in self.actions if isinstance(action, Emit) for t in action.tokens]

    @property
    def origins(self) -> list[TokenOrigin]:
        return [o for action in self.actions if isinstance(action, Emit) for o in action.origins]

    @property
    def finishes(self) -> list[Finish]:
        return [action for action in self.actions if isinstance(action, Finish)]

    def to_drafter(self) -> list[OpenSequence | Prepare | DraftNow | CloseSequence]:
        return [action.message for action in self.actions if isinstance(action, ToDrafter)]

    def assert_plain(self) -> None:
        """The answer, and why it ended, are those of plain decoding."""
        assert self.truth == self.emitted
        assert [*self.prompt, *self.truth] == self.sequence.tokens
        assert [Finish(self.ending)] == self.finishes


def _prepares(action: Action) -> bool:
    return isinstance(action, ToDrafter) and isinstance(action.message, Prepare)


def started(**settings: Any) -> Stack:
    """A stack with both services, ready to run."""
    stack = Stack(**settings)
    stack.verifier_comes()
    stack.drafter_comes()
    return stack
