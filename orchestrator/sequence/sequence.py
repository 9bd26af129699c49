"""One request's state, and what each event does to it: pure, no process and no clock.

Every method takes an event and returns the actions that answer it, in the order in which
they should be carried out: what the verifier waits for comes first. The committed tokens
are the truth; a verifier or a drafter that dies is rebuilt from them.
"""

from collections.abc import Iterator
from typing import assert_never

from orchestrator.sequence.actions import (
    Action,
    Emit,
    Finish,
    PrecomputeVerify,
    ToDrafter,
    ToVerifier,
)
from orchestrator.sequence.drafter_sync import DrafterSync
from orchestrator.sequence.limits import Limits
from orchestrator.sequence.lookup import looked_up
from orchestrator.sequence.phase import Phase
from orchestrator.sequence.planner import Planner
from orchestrator.sequence.reach import Reach
from orchestrator.sequence.round import NextRound, Round
from orchestrator.sequence.speculation_cache import Draft
from orchestrator.telemetry.recorder import Recorder
from protocol.decoding.logits_processor import BannedTokens
from protocol.messages import (
    CloseSequence,
    DraftTree,
    FinishReason,
    OpenSequence,
    Origin,
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
        plan: Planner,
        recorder: Recorder,
    ) -> None:
        self.number = number
        self.tokens: Tokens = list(prompt)
        """Prompt and emitted tokens; the last one is pending."""
        self.phase = Phase.STRANDED
        self.round = 0
        self.recorder = recorder
        self._sampling = sampling
        self._bans = BannedTokens(sampling.logits_options)
        self._plan = plan
        self._reach = Reach(limits, plan, len(prompt))
        self.current = Round()
        self._briefing = DrafterSync(number, plan)
        self._accepted = 0  # of the last outcome
        self._backup = Draft()  # what has come of the draft that the target waits for
        self._waiting_since = 0.0

    @property
    def plan(self) -> Planner:
        """How its rounds are decided."""
        return self._plan

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
        self._briefing.opened(self.tokens)
        yield ToDrafter(self._open())
        if self.phase is Phase.VERIFYING:
            self.current.speculating = self._speculates()
            yield from self._prepare()

    def drafter_down(self, reason: str) -> Iterator[Action]:
        """The drafter died, or failed on this sequence: decode without it."""
        if not self._reach.has_drafter:
            return
        self._reach.has_drafter = False
        self.current.forget()
        if self.phase is Phase.DRAFTING:
            self.recorder.fallbacks[reason] += 1
            yield from self._verify(self._backup, "miss")

    def _open(self) -> OpenSequence:
        return OpenSequence(sequence=self.number, tokens=self.tokens[:-1], sampling=self._sampling)

    # ------------------------------------------------------------ rounds

    def outcome(self, outcome: VerificationOutcome, now: float) -> Iterator[Action]:
        """The verification ended: commit, look up, and start the next round."""
        if not self.awaits(outcome.round):
            return
        done, draft = self.current, self.current.draft
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
        lesson = done.lesson(outcome, self._plan, first=self.recorder.rounds == 0)
        self._plan.estimates.observe_round(lesson)
        self.recorder.plain_rounds += not done.speculating and done.origin != "lookup"
        self.recorder.timed(outcome, len(draft) + 1, done.origin, now)
        self.recorder.learned(lesson)
        self.recorder.verified(len(draft), min(outcome.accepted, kept))
        self.recorder.emit(kept, now)
        origins: list[Origin] = [done.origin for _ in range(outcome.accepted)]
        origins.append("target")
        yield Emit(emitted[:kept], origins[:kept], outcome.logprobs[:kept])
        if reason is not None:
            yield from self.finish(reason)

    def _next_round(self, outcome: VerificationOutcome, now: float) -> Iterator[Action]:
        if not self._plan.speculates:
            if self._plan.is_paused:
                yield from self._go_on(looked_up(self.tokens, self._plan, self._bans), alone=True)
            else:
                yield from self._verify(Draft(), "target")
            return
        planned = self.current.ahead.get((outcome.accepted, outcome.bonus))
        if planned is not None:
            self.recorder.hits += 1
            yield from self._start(planned, "hit")
            return
        length = len(self.tokens)
        found = looked_up(self.tokens, self._plan, self._bans)
        if not self._reach.can_speculate(length):
            drafter = self._reach.can_draft(length)
            yield from self._go_on(found, "" if drafter else "no_drafter", alone=not drafter)
            return
        if self._plan.mode == "sd":
            count = self._plan.sequential
            yield from self._draft_now(count, now) if count else self._go_on(found)
            return
        if self.current.speculating:
            self.recorder.misses += 1
        if count := self._plan.backup(found.confidences):
            self.recorder.fallbacks["draft"] += 1
            yield from self._draft_now(count, now)
        else:
            yield from self._go_on(found, "plain")

    def _go_on(self, found: Draft, without: str = "", *, alone: bool = False) -> Iterator[Action]:
        """The target does not wait: it verifies what was looked up, or nothing."""
        worth = found.first(self._plan.looked_up(found.confidences, alone=alone))
        used = self._reach.clip(worth, len(self.tokens), "lookup")
        if fallback := "lookup" if used else without:
            self.recorder.fallbacks[fallback] += 1
        yield from self._verify(used, "lookup" if used else "target")
        if not used:
            self.current.untried = found

    def _planned(self, length: int, pending: int, draft: Draft, origin: Origin) -> NextRound:
        """The next round; the pending token is the last of `length`."""
        clipped = self._reach.clip(draft, length, origin)
        verify = Verify(
            sequence=self.number,
            round=self.round + 1,
            position=length - 1,
            chain=[pending, *clipped.tokens],
            distributions=clipped.drawn_from,
            pipelined=self._plan.mode == "ar" and self._reach.lasts(length),
        )
        return NextRound(clipped, draft.after(len(clipped)), verify)

    def _verify(self, draft: Draft, origin: Origin) -> Iterator[Action]:
        """Start a round with as much of this draft as pays."""
        planned = self._planned(len(self.tokens), self.tokens[-1], draft, origin)
        yield from self._start(planned, origin)

    def _start(self, planned: NextRound, origin: Origin) -> Iterator[Action]:
        """Start a round: the verifier checks the chain while the drafter prepares."""
        verify, draft = planned.verify, planned.draft
        self.round = verify.round
        self.current = Round(verify.chain, draft, origin, self._speculates())
        self.phase = Phase.VERIFYING
        yield ToVerifier(verify)
        yield from self._prepare()
        if self._plan.mode == "ssd" and self.current.cache.inherit(len(draft), planned.rest):
            yield from self._foresee()
        self.recorder.predicted(*self._plan.expect(draft.confidences, origin))

    def _speculates(self) -> bool:
        return self._plan.speculates and self._reach.can_speculate(len(self.tokens))

    def awaits(self, number: int) -> bool:
        """Whether the outcome of this round is what comes next."""
        return self.phase is Phase.VERIFYING and number == self.round

    def foreseen(self, outcome: VerificationOutcome) -> bool:
        """Whether the last `PrecomputeVerify` of this outcome is what it will lead to."""
        ahead = (outcome.accepted, outcome.bonus) in self.current.ahead
        return ahead and self.awaits(outcome.round) and self._plan.speculates

    def _foresee(self) -> Iterator[Action]:
        """Plan the rounds that outcomes with a newly grown draft lead to."""
        for accepted, bonus in self.current.cache.grown():
            length = len(self.tokens) + accepted + 1
            emitted = [*self.current.draft.tokens[:accepted], bonus]
            ends = self._reach.ending(len(self.tokens), emitted)[1]
            if ends or accepted > len(self.current.draft) or not self._reach.can_speculate(length):
                continue
            draft = self.current.cache.draft(accepted, bonus)
            planned = self._planned(length, bonus, draft, "hit")
            old = self.current.ahead.get((accepted, bonus))
            self.current.ahead[accepted, bonus] = planned
            if old is None or old.verify != planned.verify:
                yield PrecomputeVerify(accepted, bonus, planned.verify)

    def _prepare(self) -> Iterator[Action]:
        if self._plan.mode != "ssd" or not self.current.speculating:
            return
        yield ToDrafter(self._briefing.prepare(self.tokens, self.round, self.current))

    def _draft_now(self, count: int, now: float) -> Iterator[Action]:
        self.round += 1
        self._waiting_since = now
        self.phase = Phase.DRAFTING
        self.current, self._backup = Round(), Draft()
        count = min(count, self._reach.longest(len(self.tokens)))
        yield ToDrafter(self._briefing.draft_now(self.tokens, self.round, self._accepted, count))

    def tree(self, tree: DraftTree, now: float) -> Iterator[Action]:
        """One depth arrived: keep it, or go on if it is the draft that the target waits for."""
        if tree.round != self.round:
            self.recorder.stale_trees += 1
            return
        match self.phase:
            case Phase.VERIFYING:
                if not self.current.cache.add(tree):
                    self.recorder.stale_trees += 1  # again, or out of order
                    return
                self._plan.estimates.drew(tree.depth, len(tree.tokens), tree.draft_ms)
                yield from self._foresee()
            case Phase.DRAFTING if tree.depth == len(self._backup) + 1:
                grown = self._backup.grow(tree, 0)
                sure = self._backup.confidences
                worth = self._plan.length(sure, "miss")
                # A last token that is not worth verifying ends the drafting too.
                done = tree.last or not grown or worth < len(self._backup)
                if done or not self._plan.should_extend(sure):
                    waited_ms = 1e3 * (now - self._waiting_since)
                    self.recorder.waited(self._waiting_since, now)
                    self._plan.estimates.backup_ms.observe(waited_ms / tree.depth)
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
        self.recorder.plain_tok_s = self._plan.plain_tok_s
        yield ToVerifier(CloseSequence(sequence=self.number))
        if self._reach.has_drafter:
            yield ToDrafter(CloseSequence(sequence=self.number))
        yield Finish(reason, error)
