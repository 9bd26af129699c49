"""One request's state, and what each event does to it: pure, no process and no clock.

Every method takes an event and returns the actions that answer it, in the order in which
they should be carried out. Only the end of a verification takes two calls: `decide` returns
what the services wait for, which must leave at once, and `record` does the books while the
target is busy again. The committed tokens are the truth; a verifier or a drafter that dies
is rebuilt from them.
"""

from enum import Enum, auto
from typing import NamedTuple, assert_never

from orchestrator.sequence.actions import (
    Action,
    Emit,
    Finish,
    PrecomputeVerify,
    ToDrafter,
    ToVerifier,
)
from orchestrator.sequence.drafter_sync import DrafterSync
from orchestrator.sequence.limits import Limits, RoundLimits
from orchestrator.sequence.planner import Planner
from orchestrator.sequence.round import NextRound, Round
from orchestrator.sequence.speculation_cache import Draft
from orchestrator.telemetry.recorder import Recorder
from protocol.decoding.logits_processor import BannedTokens
from protocol.decoding.prompt_lookup import find_continuation
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


class Phase(Enum):
    """What a sequence waits for between two events."""

    VERIFYING = auto()
    DRAFTING = auto()
    """The target waits for a draft."""
    STRANDED = auto()
    """There is no verifier."""
    FINISHED = auto()


class _Decided(NamedTuple):
    """A round whose end is not in the books yet."""

    round: Round
    outcome: VerificationOutcome
    emitted: Tokens
    """Those that belong to the answer."""
    ends: FinishReason | None


class Sequence:
    """The state machine of one request."""

    def __init__(
        self,
        *,
        number: int,
        prompt: Tokens,
        sampling: Sampling,
        limits: Limits,
        planner: Planner,
        recorder: Recorder,
    ) -> None:
        self.number = number
        self.tokens: Tokens = list(prompt)
        """Prompt and emitted tokens; the last one is pending."""
        self.phase = Phase.STRANDED
        self.round = 0
        self.recorder = recorder
        self.planner = planner
        """How its rounds are decided."""
        self.current = Round()
        self._sampling = sampling
        self._bans = BannedTokens(sampling.logits_options)
        self._limits = RoundLimits(limits, planner, len(prompt))
        self._drafter_sync = DrafterSync(number, planner)
        self._decided: _Decided | None = None
        self._accepted = 0  # of the last outcome
        self._backup = Draft()  # what has arrived of the draft that the target waits for
        self._wanted = 0  # how many tokens that draft may have
        self._waiting_since = 0.0

    # ------------------------------------------------------------ services come and go

    def on_verifier_up(self, max_draft_tokens: int) -> list[Action]:
        """A verifier is ready: (re)open there and verify the pending token."""
        if self.phase is Phase.FINISHED:
            return []
        self._limits.max_draft = max_draft_tokens
        actions: list[Action] = [ToVerifier(self._open())]
        return actions + self._verify(Draft(), "target") + self._look_ahead()

    def limit_context(self, context_length: int) -> list[Action]:
        """What the verifier that is about to be used can attend to; 0 means unlimited."""
        self._limits.set_context(context_length)
        if context_length and len(self.tokens) >= context_length:
            reason = f"{len(self.tokens)} tokens do not fit the model's context, {context_length}"
            return self.finish("error", reason)
        return []

    def on_verifier_lost(self) -> None:
        """The verifier died; the sequence waits for another."""
        if self.phase is not Phase.FINISHED:
            self.phase = Phase.STRANDED

    def on_drafter_up(self, context_length: int) -> list[Action]:
        """A drafter is ready: open there, and prepare for the round in flight."""
        if self.phase is Phase.FINISHED or self.planner.mode == "ar":
            return []
        self._limits.has_drafter = True
        self._limits.drafter_context = context_length
        self._drafter_sync.on_open(self.tokens)
        actions: list[Action] = [ToDrafter(self._open())]
        if self.phase is Phase.VERIFYING:
            self.current.speculating = self._should_speculate()
            actions += self._prepare()
        return actions

    def on_drafter_lost(self, reason: str) -> list[Action]:
        """The drafter died, or failed on this sequence: decode without it."""
        if not self._limits.has_drafter:
            return []
        self._limits.has_drafter = False
        self.current.forget()
        if self.phase is not Phase.DRAFTING:
            return []
        self.recorder.fallbacks[reason] += 1
        return self._verify_backup()

    def _open(self) -> OpenSequence:
        return OpenSequence(sequence=self.number, tokens=self.tokens[:-1], sampling=self._sampling)

    # ------------------------------------------------------------ a verification ends

    def is_awaiting(self, number: int) -> bool:
        """Whether the outcome of this round is what comes next."""
        return self.phase is Phase.VERIFYING and number == self.round

    def is_precomputed(self, outcome: VerificationOutcome) -> bool:
        """Whether the last `PrecomputeVerify` for this outcome is what it will lead to."""
        known = (outcome.accepted, outcome.bonus) in self.current.next_rounds
        return known and self.is_awaiting(outcome.round) and self.planner.should_speculate

    def decide(self, outcome: VerificationOutcome, now: float) -> list[Action]:
        """Commit the outcome, look it up in the cache, and start the next round.

        What this returns should leave before `record` is called.
        """
        if not self.is_awaiting(outcome.round):
            return []
        draft = self.current.draft
        if outcome.accepted > len(draft):
            return self.finish("error", "the verifier accepted more than it was offered")
        emitted = [*draft.tokens[: outcome.accepted], outcome.bonus]
        kept, ends = self._limits.cut(len(self.tokens), emitted)
        self.tokens += emitted[:kept]
        self._accepted = outcome.accepted
        self._decided = _Decided(self.current, outcome, emitted[:kept], ends)
        return self._next_round(outcome, now) if ends is None else []

    def record(self, now: float) -> list[Action]:
        """Do the books of the round that `decide` ended; emit its tokens, and end with them."""
        if self._decided is None:
            return []
        (done, outcome, emitted, ends), self._decided = self._decided, None
        actions = self._look_ahead() if ends is None else []
        seen = done.observe(outcome, self.planner, first=self.recorder.rounds == 0)
        self.planner.estimates.observe_round(seen)
        drafted = len(done.draft)
        self.recorder.plain_rounds += not done.speculating and done.origin != "lookup"
        self.recorder.add_times(outcome, drafted + 1, done.origin, now)
        self.recorder.add_round(seen)
        self.recorder.count_verified(drafted, min(outcome.accepted, len(emitted)))
        self.recorder.count_emitted(len(emitted), now)
        origins: list[Origin] = [done.origin for _ in range(outcome.accepted)]
        origins.append("target")
        kept = len(emitted)
        actions.append(Emit(emitted, origins[:kept], outcome.logprobs[:kept]))
        return actions + (self.finish(ends) if ends is not None else [])

    def _next_round(self, outcome: VerificationOutcome, now: float) -> list[Action]:
        if not self.planner.should_speculate:
            if self.planner.is_paused:
                return self._go_on(self._look_up(), alone=True)
            return self._verify(Draft(), "target")
        prepared = self.current.next_rounds.get((outcome.accepted, outcome.bonus))
        if prepared is not None:
            self.recorder.hits += 1
            return self._start(prepared, "hit")
        return self._on_miss(now)

    def _on_miss(self, now: float) -> list[Action]:
        """No draft is prepared for the outcome."""
        length = len(self.tokens)
        lookup = self._look_up()
        if not self._limits.can_speculate(length):
            drafter = self._limits.can_draft(length)
            return self._go_on(lookup, "" if drafter else "no_drafter", alone=not drafter)
        if self.planner.mode == "sd":
            count = self.planner.sequential_length
            return self._draft_now(count, now) if count else self._go_on(lookup)
        if self.current.speculating:
            self.recorder.misses += 1
        if count := self.planner.backup_length(lookup.confidences):
            self.recorder.fallbacks["draft"] += 1
            return self._draft_now(count, now)
        return self._go_on(lookup, "plain")

    def _look_up(self) -> Draft:
        """What followed these tokens the last time, in prompt or answer: costs no drafter.

        Empty where the draft length is fixed. What a bias rules out is not proposed; what a
        grammar forbids the verifier leaves out. Under the rejection rule these are named
        tokens, a function of those before them.
        """
        draft = Draft()
        if not self.planner.num_draft_tokens:
            allowed = self._bans.count_allowed
            found, confidence = find_continuation(self.tokens, self.planner.depth, allowed)
            for token in found:
                draft.add(token, confidence)
        return draft

    def _go_on(self, lookup: Draft, without: str = "", *, alone: bool = False) -> list[Action]:
        """The target does not wait: it verifies the prompt lookup, or nothing."""
        worth = lookup.first(self.planner.lookup_length(lookup.confidences, alone=alone))
        used = self._limits.clip(worth, len(self.tokens), "lookup")
        if fallback := "lookup" if used else without:
            self.recorder.fallbacks[fallback] += 1
        actions = self._verify(used, "lookup" if used else "target")
        if not used:
            self.current.unverified_lookup = lookup
        return actions

    # ------------------------------------------------------------ a round begins

    def _plan_round(self, length: int, pending: int, draft: Draft, origin: Origin) -> NextRound:
        """The next round; the pending token is the last of `length`."""
        clipped = self._limits.clip(draft, length, origin)
        planner = self.planner
        speculates = planner.should_speculate and self._limits.can_speculate(length)
        verify = Verify(
            sequence=self.number,
            round=self.round + 1,
            position=length - 1,
            chain=[pending, *clipped.tokens],
            distributions=clipped.drawn_from,
            pipelined=planner.mode == "ar" and self._limits.goes_on(length),
            drafter_idle=not speculates or planner.mode != "ssd",
        )
        return NextRound(clipped, draft.after(len(clipped)), verify)

    def _verify(self, draft: Draft, origin: Origin) -> list[Action]:
        """Start a round with as much of this draft as pays."""
        length = len(self.tokens)
        return self._start(self._plan_round(length, self.tokens[-1], draft, origin), origin)

    def _verify_backup(self) -> list[Action]:
        return self._verify(self._backup, "miss") + self._look_ahead()

    def _start(self, planned: NextRound, origin: Origin) -> list[Action]:
        """Start a round: the verifier checks the chain while the drafter prepares."""
        draft, rest, verify = planned
        self.round = verify.round
        self.current = Round(verify.chain, draft, rest, origin, self._should_speculate())
        self.phase = Phase.VERIFYING
        return [ToVerifier(verify), *self._prepare()]

    def _should_speculate(self) -> bool:
        return self.planner.should_speculate and self._limits.can_speculate(len(self.tokens))

    def _prepare(self) -> list[Action]:
        if self.planner.mode != "ssd" or not self.current.speculating:
            return []
        asked = self._drafter_sync.prepare(self.tokens, self.round, self.current)
        self.current.asked = asked
        return [ToDrafter(asked)]

    def _draft_now(self, count: int, now: float) -> list[Action]:
        self.round += 1
        self._waiting_since = now
        self.phase = Phase.DRAFTING
        self.current, self._backup = Round(), Draft()
        self._wanted = count = min(count, self._limits.longest_draft(len(self.tokens)))
        sync = self._drafter_sync
        return [ToDrafter(sync.draft_now(self.tokens, self.round, self._accepted, count))]

    # ------------------------------------------------------------ while the target works

    def _look_ahead(self) -> list[Action]:
        """What can wait until a round has started: predict it, and plan what may follow it."""
        if self.phase is not Phase.VERIFYING:
            return []
        current = self.current
        self.recorder.count_predicted(
            *self.planner.predict(current.draft.confidences, current.origin)
        )
        if self.planner.mode == "ssd" and current.cache.inherit(len(current.draft), current.rest):
            return self._precompute()
        return []

    def _precompute(self) -> list[Action]:
        """Plan the rounds that outcomes with a newly grown draft lead to."""
        actions: list[Action] = []
        for accepted, bonus in self.current.cache.latest_outcomes():
            length = len(self.tokens) + accepted + 1
            emitted = [*self.current.draft.tokens[:accepted], bonus]
            ends = self._limits.cut(len(self.tokens), emitted)[1]
            offered = len(self.current.draft)
            if ends or accepted > offered or not self._limits.can_speculate(length):
                continue
            draft = self.current.cache.draft(accepted, bonus)
            planned = self._plan_round(length, bonus, draft, "hit")
            old = self.current.next_rounds.get((accepted, bonus))
            self.current.next_rounds[accepted, bonus] = planned
            if old is None or old.verify != planned.verify:
                actions.append(PrecomputeVerify(accepted, bonus, planned.verify))
        return actions

    def is_asked_for(self, tree: DraftTree) -> bool:
        """Whether the drafter was asked for a tree of this size, be it too late now."""
        if tree.round != self.round or self.phase in (Phase.STRANDED, Phase.FINISHED):
            return tree.round <= self.round
        if self.phase is Phase.DRAFTING:
            return len(tree.tokens) == 1 and 1 <= tree.depth <= self._wanted
        return self.current.is_asked_for(tree)

    def on_tree(self, tree: DraftTree, now: float) -> list[Action]:
        """One depth arrived: keep it, or go on if it is the draft that the target waits for."""
        if tree.round != self.round or not self.is_asked_for(tree):
            self.recorder.stale_trees += 1
            return []
        match self.phase:
            case Phase.VERIFYING:
                if not self.current.cache.add(tree):
                    self.recorder.stale_trees += 1  # again, or out of order
                    return []
                self.planner.estimates.observe_step(tree.depth, len(tree.tokens), tree.draft_ms)
                return self._precompute()
            case Phase.DRAFTING:
                return self._on_backup(tree, now)
            case Phase.STRANDED | Phase.FINISHED:
                return []
            case _:
                assert_never(self.phase)

    def _on_backup(self, tree: DraftTree, now: float) -> list[Action]:
        """A token of the draft that the target waits for."""
        if tree.depth != len(self._backup) + 1:
            return []  # out of order
        grown = self._backup.grow(tree, 0)
        confidences = self._backup.confidences
        # A last token that is not worth verifying ends the drafting too.
        short = self.planner.verify_length(confidences, "miss") < len(self._backup)
        if not (tree.last or not grown or short) and self.planner.should_extend(confidences):
            return []
        waited_ms = 1e3 * (now - self._waiting_since)
        self.recorder.add_wait(self._waiting_since, now)
        self.planner.estimates.backup_ms.observe(waited_ms / tree.depth)
        return self._verify_backup()

    def on_draft_late(self) -> list[Action]:
        """The draft that the target waits for did not come in time: use what there is."""
        if self.phase is not Phase.DRAFTING:
            return []
        self.recorder.fallbacks["late"] += 1
        return self._verify_backup()

    # ------------------------------------------------------------ the end

    def finish(self, reason: FinishReason, error: str = "") -> list[Action]:
        """End the request, whatever it waits for."""
        if self.phase is Phase.FINISHED:
            return []
        self.phase = Phase.FINISHED
        self.recorder.plain_tok_s = self.planner.plain_tok_s
        actions: list[Action] = [ToVerifier(CloseSequence(sequence=self.number))]
        if self._limits.has_drafter:
            actions.append(ToDrafter(CloseSequence(sequence=self.number)))
        return [*actions, Finish(reason, error)]
