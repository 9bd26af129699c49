"""The state machine of a request, driven by a fake target and a fake drafter, in one process.

The fake target is a function from a prefix to its next token; plain decoding with it is the
truth. The fake drafter guesses, delivers its trees when chance says so, and dies.
"""

import zlib
from collections.abc import Callable, Iterable, Iterator
from itertools import product
from math import ceil
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.estimates import Estimates
from orchestrator.plan import Plan
from orchestrator.sequence import (
    Action,
    Emit,
    Finish,
    Limits,
    Phase,
    Sequence,
    ToDrafter,
    ToVerifier,
)
from orchestrator.statistics import Recorder
from protocol.messages import (
    ENDED,
    CloseSequence,
    DraftNow,
    DraftTree,
    Mode,
    OpenSequence,
    Origin,
    Prepare,
    Sampling,
    Tokens,
    VerificationOutcome,
    Verify,
)

VOCABULARY = 7
MODES: tuple[Mode, ...] = ("ar", "sd", "ssd")
ENDLESS = Limits(10**6, frozenset({0}), 0)
"""Ends only at a stop token."""


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
    """Keeps the KV's tokens and verifies chains as the protocol says."""

    def __init__(self, target: Target, max_draft: int) -> None:
        self._target = target
        self._max_draft = max_draft
        self.kv: Tokens | None = None
        self.answer: VerificationOutcome | None = None

    def receive(self, message: OpenSequence | Verify | CloseSequence) -> None:
        match message:
            case OpenSequence():
                self.kv = list(message.tokens)
            case CloseSequence():
                self.kv = None
            case Verify():
                self.answer = self._verify(message)

    def _verify(self, message: Verify) -> VerificationOutcome:
        assert self.kv is not None
        assert len(self.kv) == message.position
        assert 1 <= len(message.chain) <= 1 + self._max_draft
        chain = message.chain
        accepted = 0
        while True:
            bonus = self._target.next([*self.kv, *chain[: accepted + 1]])
            if accepted == len(chain) - 1 or chain[accepted + 1] != bonus:
                break
            accepted += 1
        self.kv += chain[: accepted + 1]
        return VerificationOutcome(
            sequence=message.sequence,
            round=message.round,
            accepted=accepted,
            bonus=bonus,
            verify_ms=10.0 + len(chain),
            idle_ms=1.0,
        )


class FakeDrafter:
    """Guesses the target's tokens, right with probability `skill`; news ends old work."""

    def __init__(self, target: Target, skill: float, context: int, random: Random) -> None:
        self._target = target
        self._skill = skill
        self._random = random
        self._context = context
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
                assert len(message.fan_out) == len(message.chain)
                self._commit(message, len(message.chain))
                self._work = self._tree(message)
            case DraftNow():
                assert message.count > 0
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

    def _candidates(self, prefix: Tokens, wanted: int, rejected: int | None) -> Tokens:
        """The guess first, then others; never the token that was rejected."""
        others = self._random.sample(range(VOCABULARY), VOCABULARY)
        ranked = dict.fromkeys([self._guess(prefix), *others])
        return [token for token in ranked if token != rejected][:wanted]

    def _tree(self, message: Prepare) -> Iterator[DraftTree]:
        known = self.known or []
        outcomes: list[tuple[int, int]] = []
        for accepted, wanted in enumerate(message.fan_out):
            prefix = [*known, *message.chain[: accepted + 1]]
            rejected = [*message.chain, None][accepted + 1]
            outcomes += [(accepted, t) for t in self._candidates(prefix, wanted, rejected)]
        branches = [[*known, *message.chain[: k + 1], bonus] for k, bonus in outcomes]
        for depth in range(1, message.depth + 1):
            tokens = [self._next_or_end(branch) for branch in branches]
            for branch, token in zip(branches, tokens, strict=True):
                branch.append(max(token, 0))
            yield self._layer(message, depth, outcomes, tokens, last=depth == message.depth)

    def _draft(self, message: DraftNow) -> Iterator[DraftTree]:
        branch = [*(self.known or []), message.pending]
        outcome = [(message.accepted, message.pending)]
        for depth in range(1, message.count + 1):
            token = self._next_or_end(branch)
            branch.append(max(token, 0))
            last = depth == message.count or token == ENDED
            yield self._layer(message, depth, outcome, [token], last=last)
            if last:
                return

    def _next_or_end(self, branch: Tokens) -> int:
        unsure = self._skill < 1.0 and self._random.random() < 0.05
        return ENDED if unsure else self._guess(branch)

    def _layer(
        self,
        message: Prepare | DraftNow,
        depth: int,
        outcomes: list[tuple[int, int]],
        tokens: Tokens,
        *,
        last: bool,
    ) -> DraftTree:
        return DraftTree(
            sequence=message.sequence,
            round=message.round,
            depth=depth,
            outcomes=outcomes if depth == 1 else [],
            tokens=tokens,
            confidences=[1.0 if self._skill == 1.0 else self._random.random() for _ in tokens],
            draft_ms=1.0,
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
        lookahead: int = 0,
        budget: int = 0,
        skill: float = 1.0,
        seed: int = 0,
        max_draft: int = 64,
        drafter_context: int = 0,
    ) -> None:
        self.random = Random(seed)  # noqa: S311  # no secret depends on it
        self.target = target
        self.limits = limits
        self.prompt = prompt
        self.truth, self.ending = target.plain(prompt, limits)
        self._skill = skill
        self._max_draft = max_draft
        self._drafter_context = drafter_context
        self.verifier: FakeVerifier | None = None
        self.drafter: FakeDrafter | None = None
        self.wire: list[DraftTree] = []
        """Trees on their way."""
        self.past: list[DraftTree] = []
        self.past_outcomes: list[VerificationOutcome] = []
        self.actions: list[Action] = []
        self.now = 0.0
        self.sequence = Sequence(
            number=1,
            prompt=prompt,
            sampling=Sampling(),
            limits=limits,
            plan=Plan(mode, Estimates(), lookahead, budget),
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

    def _check_verify(self, message: OpenSequence | Verify | CloseSequence) -> None:
        tokens = self.sequence.tokens
        assert [*self.prompt, *self.truth][: len(tokens)] == tokens
        if isinstance(message, Verify):
            assert len(tokens) - 1 == message.position
            assert tokens[-1] == message.chain[0]
            assert len(message.chain) <= len(self.prompt) + self.limits.max_tokens - len(tokens)
            assert len(message.chain) <= (self.limits.context_length or 10**9) - len(tokens)
        if isinstance(message, OpenSequence):
            assert tokens[:-1] == message.tokens

    def _check_drafter(self, message: OpenSequence | Prepare | DraftNow | CloseSequence) -> None:
        assert self.drafter is not None
        if isinstance(message, CloseSequence):
            return
        tokens = self.sequence.tokens
        assert tokens[:-1] == self.drafter.known
        if isinstance(message, Prepare):
            assert tokens[-1] == message.chain[0]
        if isinstance(message, DraftNow):
            assert tokens[-1] == message.pending

    # ------------------------------------------------------------ what may happen

    def verifier_comes(self) -> None:
        self.verifier = FakeVerifier(self.target, self._max_draft)
        self.do(self.sequence.verifier_up(self._max_draft))

    def verifier_dies(self) -> None:
        """It is gone, and the orchestrator knows."""
        self.verifier = None
        self.sequence.verifier_down()

    def verifier_vanishes(self) -> None:
        """It is gone, and nobody has noticed yet."""
        self.verifier = None

    def drafter_comes(self) -> None:
        """A new one shakes hands; the pipeline first takes leave of the old one."""
        self.do(self.sequence.drafter_down("drafter_swapped"))
        self.drafter = FakeDrafter(self.target, self._skill, self._drafter_context, self.random)
        self.do(self.sequence.drafter_up(self._drafter_context))

    def drafter_dies(self) -> None:
        """It is gone, and the orchestrator knows; what it sent may still be on its way."""
        self.drafter = None
        self.do(self.sequence.drafter_down("drafter_died"))

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
            self.do(self.sequence.tree(self.wire.pop(0), self.now))

    def tree_overtakes(self) -> None:
        if self.wire:
            self.do(self.sequence.tree(self.wire.pop(), self.now))

    def tree_is_lost(self) -> None:
        if self.wire:
            self.wire.pop(self.random.randrange(len(self.wire)))

    def tree_comes_again(self) -> None:
        if self.past:
            self.do(self.sequence.tree(self.random.choice(self.past), self.now))

    def outcome_arrives(self) -> bool:
        """The verification ends; False if there is none."""
        if self.verifier is None or self.verifier.answer is None:
            return False
        outcome, self.verifier.answer = self.verifier.answer, None
        self.past_outcomes.append(outcome)
        self.now += 1.0
        self.do(self.sequence.outcome(outcome, self.now))
        return True

    def outcome_comes_again(self) -> None:
        if self.past_outcomes:
            self.do(self.sequence.outcome(self.random.choice(self.past_outcomes), self.now))

    def patience_ends(self) -> None:
        self.do(self.sequence.draft_is_late())

    # ------------------------------------------------------------ whole runs

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
    def origins(self) -> list[Origin]:
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


def started(**settings: object) -> Stack:
    """A stack with both services, ready to run."""
    stack = Stack(**settings)  # type: ignore[arg-type]  # as Stack's own
    stack.verifier_comes()
    stack.drafter_comes()
    return stack


PROMPTS = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=6)
LIMITS = st.builds(
    Limits,
    st.integers(1, 40),
    st.frozensets(st.integers(0, VOCABULARY - 1), max_size=1),
    st.one_of(st.just(0), st.integers(7, 40)),
)
PLANS = st.fixed_dictionaries(
    {"mode": st.sampled_from(MODES), "prompt": PROMPTS, "limits": LIMITS},
    optional={
        "lookahead": st.integers(0, 6),
        "budget": st.integers(0, 12),
        "skill": st.sampled_from([0.0, 0.3, 0.6, 0.9, 1.0]),
        "max_draft": st.sampled_from([0, 1, 3, 64]),
        "drafter_context": st.sampled_from([0, 16, 30]),
        "seed": st.integers(0, 2**32),
    },
)


@settings(max_examples=400)
@given(PLANS, st.integers(0, 255), st.integers(0, 150), st.sampled_from([0.0, 0.5, 0.9, 1.0]))
def test_the_answer_is_that_of_plain_decoding(
    plan: dict[str, object], salt: int, chaos: int, patience: float
) -> None:
    """Whoever dies, whatever is late, stale, repeated or lost: the tokens are the target's own."""
    stack = Stack(target=Target(salt), **plan)  # type: ignore[arg-type]  # as Stack's own
    stack.chaos(chaos)
    stack.calm(patience).assert_plain()
    assert {"target", "hit", "miss"} >= set(stack.origins)


@settings(max_examples=100)
@given(PLANS, st.integers(0, 255), st.integers(0, 150), st.sampled_from([0.5, 1.0]))
def test_statistics_add_up(plan: dict[str, object], salt: int, chaos: int, patience: float) -> None:
    """Counts agree with each other and with the answer, whatever happened."""
    stack = Stack(target=Target(salt), **plan)  # type: ignore[arg-type]  # as Stack's own
    stack.chaos(chaos)
    stack.calm(patience)
    recorder = stack.sequence.recorder
    assert len(stack.emitted) == recorder.emitted
    assert recorder.accepted <= recorder.drafted
    # Each round adds its accepted tokens and a bonus token, which the last may lose.
    assert recorder.emitted <= recorder.accepted + recorder.rounds <= recorder.emitted + 1
    assert recorder.accepted == sum(origin != "target" for origin in stack.origins)
    assert recorder.hits + recorder.misses <= max(0, recorder.rounds - 1)
    assert recorder.accepted == sum(recorder.accepted_at.values())
    assert recorder.drafted == sum(recorder.offered_at.values())
    assert plan["mode"] == "ssd" or recorder.hits + recorder.misses == 0
    assert plan["mode"] != "ar" or recorder.drafted == 0
    assert 1 <= recorder.rounds <= len(stack.past_outcomes)


SALTS = [salt for salt in range(120) if 25 <= len(Target(salt).plain([1, 2], ENDLESS)[0]) <= 90][:6]


@pytest.mark.parametrize("salt", SALTS)
@pytest.mark.parametrize("lookahead", [0, 1, 4])
def test_a_perfect_drafter_always_hits(salt: int, lookahead: int) -> None:
    """With a drafter that is always right and in time, every round after the first is a hit."""
    stack = started(
        mode="ssd", target=Target(salt), prompt=[1, 2], limits=ENDLESS, lookahead=lookahead
    ).calm()
    stack.assert_plain()
    recorder = stack.sequence.recorder
    assert recorder.hits > 0
    assert (recorder.rounds - 1, 0) == (recorder.hits, recorder.misses)
    assert "miss" not in stack.origins
    if lookahead:
        assert 1 + ceil(len(stack.truth) / (lookahead + 1)) == recorder.rounds


@pytest.mark.parametrize("salt", SALTS)
@pytest.mark.parametrize("mode", ["sd", "ssd"])
def test_a_perfect_drafter_is_always_accepted(salt: int, mode: Mode) -> None:
    """All tokens of a drafter that is always right stand, up to the one that ends the answer."""
    stack = started(mode=mode, target=Target(salt), prompt=[1, 2], limits=ENDLESS, lookahead=3)
    stack.calm().assert_plain()
    outcomes = stack.past_outcomes
    assert [0, *[3 for _ in outcomes[1:]]] == [outcome.accepted for outcome in outcomes]


@pytest.mark.parametrize("salt", SALTS)
def test_a_hopeless_drafter_is_never_accepted(salt: int) -> None:
    """A drafter that is always wrong costs nothing but rounds of one token each."""
    stack = started(mode="ssd", target=Target(salt), prompt=[1, 2], limits=ENDLESS, skill=0.0)
    stack.calm().assert_plain()
    assert stack.sequence.recorder.accepted == 0
    assert len(stack.truth) + 1 == stack.sequence.recorder.rounds


@pytest.mark.parametrize("salt", SALTS)
@pytest.mark.parametrize("skill", [0.5, 0.9])
@pytest.mark.parametrize("patience", [0.3, 1.0])
def test_every_later_round_is_a_hit_or_a_miss(salt: int, skill: float, patience: float) -> None:
    """With a drafter that stays, hits and misses are all rounds but the first."""
    stack = started(
        mode="ssd", target=Target(salt), prompt=[1, 2], limits=ENDLESS, skill=skill, seed=salt
    ).calm(patience)
    recorder = stack.sequence.recorder
    assert recorder.hits > 0
    assert recorder.rounds - 1 == recorder.hits + recorder.misses
    assert recorder.fallbacks.total() == recorder.misses


def test_what_was_not_prepared_in_time_is_a_miss() -> None:
    """An outcome that arrives before any depth of the tree is a miss, however good the drafter."""
    stack = started(mode="ssd", target=Target(SALTS[0]), prompt=[1, 2], limits=ENDLESS)
    stack.calm(patience=0.0).assert_plain()
    recorder = stack.sequence.recorder
    assert recorder.hits == 0
    assert recorder.rounds - 1 == recorder.misses


@pytest.mark.parametrize("mode", MODES)
def test_each_mode_talks_only_as_it_should(mode: Mode) -> None:
    """Plain decoding never bothers the drafter, and only speculative speculation prepares."""
    stack = started(mode=mode, target=Target(SALTS[0]), prompt=[1, 2], limits=ENDLESS, skill=0.7)
    stack.calm()
    kinds = {type(message) for message in stack.to_drafter()}
    expected = {
        "ar": set[type](),
        "sd": {OpenSequence, DraftNow, CloseSequence},
        "ssd": {OpenSequence, Prepare, CloseSequence},
    }
    assert expected[mode] == kinds


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("lookahead", [1, 4])
def test_answers_end_where_plain_decoding_ends(mode: Mode, lookahead: int) -> None:
    """Stop tokens, max_tokens and the context length cut every mode's answer at the same token."""
    endings = set()
    for salt, tokens, context in product((1, 2, 3), (1, 2, 3, 5, 6, 11), (0, 3, 6, 9)):
        limits = Limits(tokens, frozenset({3}), context)
        stack = started(
            mode=mode, target=Target(salt), prompt=[4, 5], limits=limits, lookahead=lookahead
        )
        stack.calm().assert_plain()
        endings.add(stack.ending)
    assert endings == {"stop", "length", "context"}


def test_a_stop_token_inside_a_chain_drops_the_rest() -> None:
    """Accepted tokens behind a stop token are not part of the answer, nor counted as accepted."""
    target = next(t for t in map(Target, range(250)) if len(t.plain([1, 2], ENDLESS)[0]) == 3)
    stack = started(mode="sd", target=target, prompt=[1, 2], limits=ENDLESS, lookahead=6)
    stack.calm().assert_plain()
    assert stack.past_outcomes[-1].accepted == 6
    recorder = stack.sequence.recorder
    assert (recorder.rounds, recorder.accepted, recorder.emitted) == (2, 2, 3)


@pytest.mark.parametrize("mode", ["sd", "ssd"])
def test_the_verifier_is_served_first(mode: Mode) -> None:
    """An outcome's first action is the next Verify or the call for a draft; text is last."""
    stack = started(mode=mode, target=Target(SALTS[1]), prompt=[1, 2], limits=ENDLESS, skill=0.8)
    while stack.sequence.phase is not Phase.FINISHED:
        while stack.drafter_works():
            stack.tree_arrives()
        before = len(stack.actions)
        assert stack.outcome_arrives()
        answered = stack.actions[before:]
        if isinstance(answered[-1], Finish):
            return
        first = answered[0]
        assert isinstance(first, ToVerifier if mode == "ssd" else ToDrafter)
        assert isinstance(first.message, Verify if mode == "ssd" else DraftNow)
        assert isinstance(answered[-1], Emit)
    raise AssertionError("the run ends with Finish")


def test_without_a_verifier_a_request_waits() -> None:
    """A request that meets no verifier does nothing until one comes, and then starts."""
    stack = Stack(mode="ssd", target=Target(SALTS[0]), prompt=[1, 2], limits=ENDLESS)
    stack.drafter_comes()
    assert stack.sequence.phase is Phase.STRANDED
    assert [OpenSequence] == [type(message) for message in stack.to_drafter()]
    stack.calm().assert_plain()
    assert stack.sequence.recorder.hits > 0


def test_a_restarted_verifier_gets_the_committed_tokens() -> None:
    """After a death the sequence opens with what was committed and verifies the pending token."""
    stack = started(mode="ssd", target=Target(SALTS[0]), prompt=[1, 2], limits=ENDLESS, lookahead=2)
    for _ in range(3):
        while stack.drafter_works():
            stack.tree_arrives()
        stack.outcome_arrives()
    stack.verifier_dies()
    assert stack.sequence.phase is Phase.STRANDED
    before = len(stack.actions)
    stack.verifier_comes()
    opened, verify = [a.message for a in stack.actions[before:] if isinstance(a, ToVerifier)]
    assert isinstance(opened, OpenSequence)
    assert isinstance(verify, Verify)
    tokens = stack.sequence.tokens
    assert (tokens[:-1], tokens[-1:]) == (opened.tokens, verify.chain)
    stack.calm().assert_plain()


@pytest.mark.parametrize("mode", ["sd", "ssd"])
def test_without_a_drafter_decoding_is_plain(mode: Mode) -> None:
    """A request that has no drafter decodes one token per round, and says why."""
    stack = Stack(mode=mode, target=Target(SALTS[0]), prompt=[1, 2], limits=ENDLESS)
    stack.verifier_comes()
    stack.calm().assert_plain()
    recorder = stack.sequence.recorder
    assert len(stack.truth) + 1 == recorder.rounds
    assert {"no_drafter": recorder.rounds - 1} == dict(recorder.fallbacks)


def test_a_drafter_that_comes_late_still_helps() -> None:
    """A drafter that joins in the middle is told all, and asked at once for the running round."""
    stack = Stack(mode="ssd", target=Target(SALTS[0]), prompt=[1, 2], limits=ENDLESS)
    stack.verifier_comes()
    for _ in range(5):
        stack.outcome_arrives()
    stack.drafter_comes()
    opened, prepare = stack.to_drafter()
    assert isinstance(opened, OpenSequence)
    assert stack.sequence.tokens[:-1] == opened.tokens
    assert isinstance(prepare, Prepare)
    assert (len(opened.tokens), []) == (prepare.base, prepare.tokens)
    stack.calm().assert_plain()
    recorder = stack.sequence.recorder
    assert recorder.rounds - 1 - 5 <= recorder.hits


@pytest.mark.parametrize("event", ["late", "died"])
def test_the_target_does_not_wait_for_ever(event: str) -> None:
    """A draft that is late, or never comes, is verified as far as it has come."""
    stack = started(mode="sd", target=Target(SALTS[0]), prompt=[1, 2], limits=ENDLESS, lookahead=4)
    stack.outcome_arrives()
    assert stack.sequence.phase is Phase.DRAFTING
    for _ in range(2):
        stack.drafter_works()
        stack.tree_arrives()
    if event == "late":
        stack.patience_ends()
    else:
        stack.drafter_dies()
    verify = [a.message for a in stack.actions if isinstance(a, ToVerifier)][-1]
    assert isinstance(verify, Verify)
    assert [*stack.prompt, *stack.truth][2:5] == verify.chain
    reason = "late" if event == "late" else "drafter_died"
    assert {reason: 1} == dict(stack.sequence.recorder.fallbacks)
    stack.calm().assert_plain()


def test_near_its_context_a_drafter_is_left_alone() -> None:
    """A drafter with a shorter context helps as long as it can; then decoding is plain."""
    stack = started(
        mode="ssd",
        target=Target(SALTS[0]),
        prompt=[1, 2],
        limits=ENDLESS,
        lookahead=2,
        drafter_context=20,
    ).calm()
    stack.assert_plain()
    recorder = stack.sequence.recorder
    assert recorder.hits > 0
    assert recorder.fallbacks["no_drafter"] > 0


def test_a_target_that_cannot_rewind_decodes_plainly() -> None:
    """A verifier that can roll nothing back never gets a draft token."""
    stack = started(
        mode="ssd", target=Target(SALTS[0]), prompt=[1, 2], limits=ENDLESS, max_draft=0
    ).calm()
    stack.assert_plain()
    assert stack.sequence.recorder.drafted == 0


@pytest.mark.parametrize("mode", MODES)
def test_a_cancelled_request_is_closed_everywhere(mode: Mode) -> None:
    """Finishing closes the sequence at its services once, and nothing follows it."""
    stack = started(mode=mode, target=Target(SALTS[0]), prompt=[1, 2], limits=ENDLESS)
    stack.outcome_arrives()
    stack.do(stack.sequence.finish("cancelled"))
    assert stack.sequence.phase is Phase.FINISHED
    before = len(stack.actions)
    stack.do(stack.sequence.finish("error", "again"))
    stack.chaos(200)
    assert stack.actions[before:] == []
    assert [Finish("cancelled")] == stack.finishes
    closes = [
        a for a in stack.actions[:before] if isinstance(getattr(a, "message", 0), CloseSequence)
    ]
    assert len(closes) == (1 if mode == "ar" else 2)


def test_an_answer_may_be_ended_while_it_is_emitted() -> None:
    """A stop string found in the emitted text ends the request, although a round is in flight."""
    stack = started(mode="ssd", target=Target(SALTS[0]), prompt=[1, 2], limits=ENDLESS)
    assert stack.verifier is not None
    assert stack.verifier.answer is not None
    for action in stack.sequence.outcome(stack.verifier.answer, 1.0):
        if isinstance(action, Emit):
            stack.do(stack.sequence.finish("stop"))
    assert [Finish("stop")] == stack.finishes
    stack.chaos(100)
    assert [Finish("stop")] == stack.finishes
