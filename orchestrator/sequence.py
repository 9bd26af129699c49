"""One request's state, and what each event does to it: pure, no process and no clock.

Every method takes an event and returns the actions that answer it, in the order in which
they should be carried out: what the verifier waits for comes first. The committed tokens
are the truth; a verifier or a drafter that dies is rebuilt from them.
"""

from collections.abc import Iterator
from typing import assert_never

from orchestrator.actions import Action, Emit, Finish, Foresee, ToDrafter, ToVerifier
from orchestrator.cache import Draft, SpeculationCache
from orchestrator.limits import Limits
from orchestrator.phase import Phase
from orchestrator.plan import Plan
from orchestrator.reach import Reach
from orchestrator.statistics import Recorder
from protocol.messages import (
    CloseSequence,
    DraftNow,
    DraftTree,
    FinishReason,
    OpenSequence,
    Origin,
    Prepare,
    Sampling,
    Tokens,
    VerificationOutcome,
    Verify,
)


class Sequence:
    """The state machine of one request."""

    def __init__(
        self,
        *,
        number: int,
        prompt: Tokens,
        sampling: Sampling,
        limits: Limits,
        plan: Plan,
        recorder: Recorder,
    ) -> None:
        self.number = number
        self.tokens: Tokens = list(prompt)
        """Prompt and emitted tokens; the last one is pending."""
        self.phase = Phase.STRANDED
        self.round = 0
        self.recorder = recorder
        self.cache = SpeculationCache()
        self._sampling = sampling
        self._plan = plan
        self._reach = Reach(limits, plan, len(prompt))
        self._chain: Tokens = []
        self._draft = Draft()
        """The draft tokens of the chain."""
        self._ahead: dict[tuple[int, int], tuple[Draft, Verify]] = {}
        """The rounds that the prepared outcomes lead to."""
        self._origin: Origin = "target"
        self._told = 0
        """How many committed tokens the drafter has been told."""
        self._accepted = 0  # of the last outcome
        self._backup = Draft()  # what has arrived of the draft that the target waits for
        self._waiting_since = 0.0

    # ------------------------------------------------------------ services come and go

    def verifier_up(self, max_draft_tokens: int) -> Iterator[Action]:
        """A verifier is ready: (re)open there and verify the pending token."""
        if self.phase is Phase.FINISHED:
            return
        self._reach.max_draft = max_draft_tokens
        yield ToVerifier(self._open())
        yield from self._verify(Draft(), "target")

    def limit_context(self, context_length: int) -> Iterator[Action]:
        """What the verifier that is about to be used can attend to; 0 means unlimited."""
        self._reach.limit_context(context_length)
        if context_length and len(self.tokens) >= context_length:
            reason = f"{len(self.tokens)} tokens do not fit the model's context, {context_length}"
            yield from self.finish("error", reason)

    def verifier_down(self) -> None:
        """The verifier died; the sequence waits for another."""
        if self.phase is not Phase.FINISHED:
            self.phase = Phase.STRANDED

    def drafter_up(self, context_length: int) -> Iterator[Action]:
        """A drafter is ready: open there, and prepare for the round in flight."""
        if self.phase is Phase.FINISHED or self._plan.mode == "ar":
            return
        self._reach.has_drafter = True
        self._reach.drafter_context = context_length
        self._told = len(self.tokens) - 1
        yield ToDrafter(self._open())
        if self.phase is Phase.VERIFYING:
            yield from self._prepare()

    def drafter_down(self, reason: str) -> Iterator[Action]:
        """The drafter died, or failed on this sequence: decode without it."""
        if not self._reach.has_drafter:
            return
        self._reach.has_drafter = False
        backup = self._backup
        self._forget()
        if self.phase is Phase.DRAFTING:
            self.recorder.fallbacks[reason] += 1
            yield from self._verify(backup, "miss")

    def _forget(self) -> None:
        """What was prepared is worthless."""
        self.cache.clear()
        self._ahead = {}
        self._backup = Draft()

    def _open(self) -> OpenSequence:
        return OpenSequence(sequence=self.number, tokens=self.tokens[:-1], sampling=self._sampling)

    # ------------------------------------------------------------ rounds

    def outcome(self, outcome: VerificationOutcome, now: float) -> Iterator[Action]:
        """The verification ended: commit, look up, and start the next round."""
        if not self.awaits(outcome.round):
            return
        draft, origin = self._draft, self._origin
        if outcome.accepted > len(draft):
            yield from self.finish("error", "the verifier accepted more than it was offered")
            return
        emitted = [*draft.tokens[: outcome.accepted], outcome.bonus]
        kept, reason = self._reach.ending(len(self.tokens), emitted)
        self.tokens += emitted[:kept]
        self._accepted = outcome.accepted
        if reason is None:
            yield from self._next_round(outcome, now)
        # The target is busy again: now there is time for the books.
        estimates = self._plan.estimates
        estimates.verify_cost.observe(len(draft) + 1, outcome.verify_ms)
        estimates.calibration.observe(draft.confidences, outcome.accepted)
        self.recorder.timed(outcome, len(draft) + 1, hit=origin == "hit")
        self.recorder.verified(len(draft), min(outcome.accepted, kept))
        self.recorder.emit(kept, now)
        origins: list[Origin] = [origin for _ in range(outcome.accepted)]
        origins.append("target")
        yield Emit(emitted[:kept], origins[:kept])
        if reason is not None:
            yield from self.finish(reason)

    def _next_round(self, outcome: VerificationOutcome, now: float) -> Iterator[Action]:
        planned = self._ahead.get((outcome.accepted, outcome.bonus))
        if planned is not None:
            self.recorder.hits += 1
            yield from self._start(*planned, "hit")
            return
        mode, length = self._plan.mode, len(self.tokens)
        if mode == "ar" or not self._reach.can_speculate(length):
            if mode != "ar" and not self._reach.can_draft(length):
                self.recorder.fallbacks["no_drafter"] += 1
            yield from self._verify(Draft(), "target")
            return
        if mode == "sd":
            yield from self._draft_now(self._plan.depth, now)
            return
        self.recorder.misses += 1
        self.recorder.fallbacks[self._plan.backup] += 1
        if self._plan.backup == "draft":
            yield from self._draft_now(self._plan.depth, now)
        else:
            yield from self._verify(Draft(), "target")

    def _next_verify(self, length: int, pending: int, draft: Draft) -> Verify:
        """The next round's verification; the pending token is the last of `length`."""
        return Verify(
            sequence=self.number,
            round=self.round + 1,
            position=length - 1,
            chain=[pending, *draft.tokens],
            laws=draft.drawn_from,
        )

    def _verify(self, draft: Draft, origin: Origin) -> Iterator[Action]:
        """Start a round with as much of this draft as pays."""
        length = len(self.tokens)
        draft = self._reach.clip(draft, length)
        yield from self._start(draft, self._next_verify(length, self.tokens[-1], draft), origin)

    def _start(self, draft: Draft, verify: Verify, origin: Origin) -> Iterator[Action]:
        """Start a round: the verifier checks the chain while the drafter prepares."""
        self._draft = draft
        self.round = verify.round
        self._chain = verify.chain
        self._origin = origin
        self.phase = Phase.VERIFYING
        self._forget()
        yield ToVerifier(verify)
        yield from self._prepare()

    def awaits(self, number: int) -> bool:
        """Whether the outcome of this round is what comes next."""
        return self.phase is Phase.VERIFYING and number == self.round

    def foreseen(self, outcome: VerificationOutcome) -> bool:
        """Whether the last `Foresee` of this outcome is what it will lead to."""
        return self.awaits(outcome.round) and (outcome.accepted, outcome.bonus) in self._ahead

    def _foresee(self) -> Iterator[Action]:
        """Plan the rounds that outcomes with a newly grown draft lead to."""
        for accepted, bonus in self.cache.grown():
            length = len(self.tokens) + accepted + 1
            emitted = [*self._draft.tokens[:accepted], bonus]
            ends = self._reach.ending(len(self.tokens), emitted)[1]
            if ends or accepted > len(self._draft) or not self._reach.can_speculate(length):
                continue
            draft = self._reach.clip(self.cache.draft(accepted, bonus), length)
            old = self._ahead.get((accepted, bonus))
            if old is not None and len(old[0]) == len(draft):
                continue
            verify = self._next_verify(length, bonus, draft)
            self._ahead[accepted, bonus] = draft, verify
            yield Foresee(accepted, bonus, verify)

    def _prepare(self) -> Iterator[Action]:
        if self._plan.mode != "ssd" or not self._reach.can_speculate(len(self.tokens)):
            return
        base, tokens = self._news()
        yield ToDrafter(
            Prepare(
                sequence=self.number,
                round=self.round,
                base=base,
                tokens=tokens,
                chain=self._chain,
                fan_out=self._plan.fan_out(self._draft.confidences),
                depth=self._plan.depth,
                held_back=self._plan.held_back,
            )
        )

    def _draft_now(self, count: int, now: float) -> Iterator[Action]:
        self.round += 1
        self._waiting_since = now
        self.phase = Phase.DRAFTING
        self._forget()
        base, tokens = self._news()
        yield ToDrafter(
            DraftNow(
                sequence=self.number,
                round=self.round,
                base=base,
                tokens=tokens,
                pending=self.tokens[-1],
                accepted=self._accepted,
                count=min(count, self._reach.longest(len(self.tokens))),
                held_back=self._plan.held_back,
            )
        )

    def _news(self) -> tuple[int, Tokens]:
        """The committed tokens that the drafter has not been told, and where they start."""
        base = self._told
        self._told = len(self.tokens) - 1
        return base, self.tokens[base:-1]

    def tree(self, tree: DraftTree, now: float) -> Iterator[Action]:
        """One depth arrived: keep it, or go on if it is the draft that the target waits for."""
        if tree.round != self.round:
            return
        match self.phase:
            case Phase.VERIFYING:
                if self.cache.add(tree):
                    yield from self._foresee()
            case Phase.DRAFTING if tree.depth == len(self._backup) + 1:
                grown = self._backup.grow(tree, 0)
                worth = self._plan.length(self._backup.confidences)
                # A last token that is not worth verifying ends the drafting too.
                if tree.last or not grown or worth < len(self._backup):
                    self.recorder.phase("draft_wait", 1e3 * (now - self._waiting_since))
                    yield from self._verify(self._backup, "miss")
            case Phase.DRAFTING | Phase.STRANDED | Phase.FINISHED:
                pass  # out of order, or nobody waits
            case _:
                assert_never(self.phase)

    def draft_is_late(self) -> Iterator[Action]:
        """The draft that the target waits for did not come in time: use what there is."""
        if self.phase is Phase.DRAFTING:
            self.recorder.fallbacks["late"] += 1
            yield from self._verify(self._backup, "miss")

    def finish(self, reason: FinishReason, error: str = "") -> Iterator[Action]:
        """End the request, whatever it waits for."""
        if self.phase is Phase.FINISHED:
            return
        self.phase = Phase.FINISHED
        yield ToVerifier(CloseSequence(sequence=self.number))
        if self._reach.has_drafter:
            yield ToDrafter(CloseSequence(sequence=self.number))
        yield Finish(reason, error)
