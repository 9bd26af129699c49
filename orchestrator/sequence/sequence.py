"""The state machine of one request: pure, without processes and clocks.

Every method takes an event and returns the resulting actions, in the order of execution. Only the
end of a verification takes two calls: `decide` returns the messages that the services wait for,
which must be sent at once, and `record` does the bookkeeping while the target is busy again. A
service that dies is rebuilt from the committed tokens.
"""

from typing import assert_never

from msgspec.structs import replace

from orchestrator.sequence.actions import Action, Emit, Finish, ToDrafter, ToVerifier
from orchestrator.sequence.draft import Draft
from orchestrator.sequence.drafter_sync import DrafterSync
from orchestrator.sequence.free_run import MOST_GRANTED, FreeRun
from orchestrator.sequence.limits import Limits, RequestLimits
from orchestrator.sequence.next_rounds import NextRounds
from orchestrator.sequence.phase import Phase
from orchestrator.sequence.planner import Planner, Preparation
from orchestrator.sequence.round import EndedRound, NextRound, Round, fits
from orchestrator.sequence.speculation_cache import BACKUP, SpeculationCache
from orchestrator.telemetry.recorder import Recorder
from protocol.messages import (
    CloseSequence,
    DraftTree,
    FinishReason,
    OpenSequence,
    Origin,
    Sampling,
    Tokens,
    VerificationOutcome,
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
        """Decides its rounds."""
        self.current = Round()
        self._sampling = sampling
        self._limits = RequestLimits(limits, len(prompt))
        self._drafter_sync = DrafterSync(number)
        self._free_run = FreeRun(number)
        self._next_rounds = NextRounds(number, planner, self._limits, sampling.logits_options)
        self._decided: EndedRound | None = None
        self._is_held = False  # other requests have their turn
        self._row = 0  # row in which the last outcome ended
        self._backup = SpeculationCache()  # the part of the awaited draft that has arrived
        self._waiting_since, self._first_ms = 0.0, 0.0

    # ------------------------------------------------------------ services come and go

    def on_verifier_up(self, max_draft_tokens: int, *, takes_trees: bool = False) -> list[Action]:
        """Open the sequence at a ready verifier, and verify the pending token."""
        if self.phase is Phase.FINISHED:
            return []
        self._limits.max_draft = max_draft_tokens
        self._limits.verifier_takes_trees = takes_trees
        return [ToVerifier(self._open()), *self._verify(Draft(), "target"), *self._prepare()]

    def limit_context(self, context_length: int) -> list[Action]:
        """Set the context length of the next verifier; 0 means unlimited."""
        why = self._limits.set_context(context_length, len(self.tokens))
        return self.finish("error", why) if why else []

    def on_verifier_lost(self) -> None:
        """Wait for another verifier after this one died."""
        if self.phase is not Phase.FINISHED:
            self.phase = Phase.STRANDED
            self.round += MOST_GRANTED if self.round else 0  # its last outcomes are void

    def suspend(self) -> list[Action]:
        """Close the sequence at the services; it waits to be opened again."""
        self.on_verifier_lost()
        self._is_held, self.recorder.was_suspended = False, True
        return self._close()

    def hold(self) -> list[Action]:
        """Start no further round by itself: other requests have their turn."""
        self._is_held = True
        return self._free_run.revoke()

    def release(self) -> list[Action]:
        """Resume from a hold."""
        self._is_held = False
        if self.phase is not Phase.HELD:
            return []
        self.recorder.was_suspended = True
        return self._verify(Draft(), "target") + self._prepare()

    def on_drafter_up(self, context_length: int, *, takes_trees: bool = False) -> list[Action]:
        """Open the sequence at a ready drafter, and prepare for the round in flight."""
        if self.phase is Phase.FINISHED or self.planner.mode == "ar":
            return []
        self._limits.has_drafter = True
        self._limits.drafter_context = context_length
        self._limits.drafter_takes_trees = takes_trees
        self._drafter_sync.on_open(self.tokens)
        actions: list[Action] = [ToDrafter(self._open())]
        if self.phase is Phase.VERIFYING:
            self.current.speculating = self._should_speculate()
            actions += self._prepare() + self._check_free_run()
        return actions

    def on_drafter_filled(self) -> None:
        """Record that the drafter has computed the prompt."""
        self._drafter_sync.is_filling = False

    def on_drafter_lost(self, reason: str) -> list[Action]:
        """Decode without the drafter, which died or failed on this sequence."""
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

    def decide(self, outcome: VerificationOutcome, now: float) -> list[Action]:
        """Commit the outcome, look it up in the cache, and start the next round.

        The target waits: the returned actions must be executed before `record` is called.
        """
        if self.phase is not Phase.VERIFYING or outcome.round != self.round:
            return []
        draft = self.current.draft
        if outcome.row > len(draft) or len(draft.path(outcome.row)) != outcome.accepted:
            return self.finish("error", "the verifier accepted what it was not offered")
        emitted = [*draft.tokens_to(outcome.row), outcome.bonus]
        kept, ends = self._limits.cut(len(self.tokens), emitted)
        self.tokens += emitted[:kept]
        self._row = outcome.row
        self._decided = EndedRound(self.current, outcome, emitted[:kept], ends)
        self._free_run.on_outcome(outcome)
        if self._is_held and not outcome.goes_on:
            self.phase = Phase.HELD
        elif ends is None:
            return self._next_round(outcome, now)
        return []

    def record(self, now: float) -> list[Action]:
        """Tell the drafter of the round that `decide` started; do the bookkeeping of the one that
        it ended, and emit its tokens.
        """
        if self._decided is None:
            return []
        ended, self._decided = self._decided, None
        done, outcome, emitted, ends = ended
        has_started = self.phase is Phase.VERIFYING and self.current is not done
        actions = self._prepare() if has_started and not self.current.continues_run else []
        last_token_at = self.recorder.take_last_token_at()
        observation = done.observe(outcome, self.planner, ended_at=now, last_token_at=last_token_at)
        self.planner.estimates.observe_round(observation)
        if ends is None and not self._is_held:
            actions += self._check_free_run()
        origins, logprobs = ended.record(self.recorder, observation, now), outcome.logprobs
        actions.append(Emit(emitted, origins, logprobs[: len(emitted)]))
        return actions + (self.finish(ends) if ends is not None else [])

    def _next_round(self, outcome: VerificationOutcome, now: float) -> list[Action]:
        if outcome.goes_on:
            return self._continue_run()
        if not self.planner.should_speculate:
            return self._go_on(self._next_rounds.find_lookup(self.tokens), alone=True)
        if prepared := self._next_rounds.find(self.current, outcome, len(self.tokens)):
            self.recorder.hits += 1
            return self._start(prepared, "hit")
        return self._on_miss(now)

    def _on_miss(self, now: float) -> list[Action]:
        """Handle an outcome without a prepared draft."""
        length, lookup = len(self.tokens), self._next_rounds.find_lookup(self.tokens)
        if not self._next_rounds.can_speculate(length):
            drafter = self._limits.can_draft(length, self.planner.depth)
            return self._go_on(lookup, "" if drafter else "no_drafter", alone=not drafter)
        self.recorder.misses += self.current.request is not None
        late = self.planner.estimates.drafter_is_late
        silent = self._drafter_sync.is_silent(self.round, is_late=late)
        if self._drafter_is_behind or (silent and not self.planner.num_draft_tokens):
            return self._go_on(lookup, "plain")
        if count := self.planner.backup_length(lookup):
            if self.planner.mode == "ssd":
                self.recorder.fallbacks["draft"] += 1
            return self._draft_now(count, now)
        return self._go_on(lookup, "plain" if self.planner.mode == "ssd" else "")

    def _go_on(self, lookup: Draft, without: str = "", *, alone: bool = False) -> list[Action]:
        """Start a round without waiting: with the prompt lookup, or plainly."""
        used = self._next_rounds.choose_lookup(lookup, len(self.tokens), alone=alone)
        if fallback := "lookup" if used else without:
            self.recorder.fallbacks[fallback] += 1
        actions = self._verify(used, "lookup" if used else "target")
        if not used:
            self.current.unverified_lookup = lookup
        return actions

    def _continue_run(self) -> list[Action]:
        """Follow the verifier, which has started the next round of a free run."""
        self.round, self.current = self.round + 1, Round([self.tokens[-1]], continues_run=True)
        if self.planner.should_speculate and not self._limits.has_drafter:
            self.recorder.fallbacks["no_drafter"] += 1
        return []

    def _check_free_run(self) -> list[Action]:
        """End a free run if there is something better to do; otherwise let it continue."""
        if not self._free_run.goes_on:
            return []
        rounds = self._next_rounds
        if self._should_speculate() or rounds.find_better(self.current, self.tokens):
            return self._free_run.revoke()
        return self._free_run.renew(rounds.count_grant(len(self.tokens)))

    def _verify(self, draft: Draft, origin: Origin) -> list[Action]:
        """Start a round with as much of this draft as pays."""
        length = len(self.tokens)
        planned = self._next_rounds.plan(self.round + 1, length, self.tokens[-1], draft, origin)
        return self._start(planned, origin)

    def _verify_backup(self) -> list[Action]:
        return self._verify(self._backup.draft(*BACKUP), "miss") + self._prepare()

    def _start(self, planned: NextRound, origin: Origin) -> list[Action]:
        """Start a round; `_prepare` follows once its `Verify` has been sent."""
        draft, offered, rows, verify = planned
        self.round = verify.round
        sync = self._drafter_sync
        works = self._should_speculate() and not (self._drafter_is_behind or sync.is_filling)
        speculating = works or origin in {"hit", "miss"}
        self.current = Round(verify.nodes, draft, offered, rows, origin, speculating)
        self.phase = Phase.VERIFYING
        self._free_run.on_verify(verify)
        return [ToVerifier(verify)]

    @property
    def _drafter_is_behind(self) -> bool:
        """True if the drafter has to catch up, during a verification without a draft."""
        planner, sync = self.planner, self._drafter_sync
        return planner.mode == "ssd" and sync.is_behind(self.tokens, in_turn=planner.is_in_turn)

    def _should_speculate(self) -> bool:
        return self._next_rounds.speculates(len(self.tokens))

    def _prepare(self) -> list[Action]:
        """Tell the drafter what to do during the round that has started."""
        sync, current = self._drafter_sync, self.current
        if self.planner.prepares:
            current.cache.inherit(current.offered, current.rows)
        if self._should_speculate() and self._drafter_is_behind:
            current.is_contended = True
            return [ToDrafter(sync.catch_up(self.tokens, self.round))]
        if not (self.planner.prepares and current.speculating):
            stops = sync.stop(self.tokens, self.round) if self._limits.has_drafter else []
            return [ToDrafter(stop) for stop in stops]
        draft, plan = self._next_rounds.plan_preparation(current)
        current.is_contended = True
        current.request = sync.prepare(self.tokens, self.round, draft, plan)
        return [ToDrafter(current.request)]

    def _draft_now(self, count: int, now: float) -> list[Action]:
        self.round, self._waiting_since, self.phase = self.round + 1, now, Phase.DRAFTING
        self.current, self._backup = Round(), SpeculationCache()
        count = min(count, self._limits.longest_draft(len(self.tokens)))
        plan = Preparation([], count, self.planner.held_back, self._next_rounds.siblings)
        request = self._drafter_sync.draft_now(self.tokens, self.round, self._row, plan)
        return [ToDrafter(request)]

    # ------------------------------------------------------------ while the target works

    def is_asked_for(self, tree: DraftTree) -> bool:
        """Return True if the drafter was asked for a tree of this size, even if it is late now."""
        if tree.round != self.round or self.phase in (Phase.STRANDED, Phase.HELD, Phase.FINISHED):
            return tree.round <= self.round
        if self.phase is Phase.DRAFTING:
            return bool(tree.tokens) and fits(tree, self._drafter_sync.awaited, 1)
        return self.current.is_asked_for(tree)

    def on_tree(self, tree: DraftTree, now: float) -> list[Action]:
        """Handle a depth: keep it, or continue if it is the draft that the target waits for."""
        self.on_drafter_filled()  # or it could not draft
        if tree.round != self.round or not self.is_asked_for(tree):
            self.recorder.stale_trees += 1
            return []
        match self.phase:
            case Phase.VERIFYING:
                if not self.current.cache.add(tree):
                    self.recorder.stale_trees += 1  # duplicate, or out of order
                    return []
                self.planner.estimates.observe_step(tree.depth, tree.draft_ms)
                return []
            case Phase.DRAFTING:
                return self._on_backup(tree, now)
            case Phase.STRANDED | Phase.HELD | Phase.FINISHED:
                return []
            case _:
                assert_never(self.phase)

    def _on_backup(self, tree: DraftTree, now: float) -> list[Action]:
        """Handle a depth of the awaited draft."""
        if tree.depth != self._backup.depth + 1:
            return []  # out of order
        if tree.last:
            self._drafter_sync.on_last_depth()
        waited_ms = 1e3 * (now - self._waiting_since)
        if tree.depth == 1:
            self._first_ms = waited_ms
            tree = replace(tree, outcomes=[BACKUP])
        is_added, draft = self._backup.add(tree), self._backup.draft(*BACKUP)
        grown = is_added and draft.depth == tree.depth
        # A last token that is not worth verifying ends the draft too.
        chosen = self._next_rounds.choose(draft, len(self.tokens), "miss")
        useful = grown and draft.main[-1] in chosen
        if useful and not tree.last and self.planner.should_extend(draft):
            return []
        self.recorder.add_wait(self._waiting_since, now)
        if not self._drafter_sync.had_far_to_go:
            self.planner.estimates.observe_wait(tree.depth, self._first_ms, waited_ms)
        actions = self._verify_backup()
        self.current.waited_ms = waited_ms
        return actions

    def on_draft_late(self) -> list[Action]:
        """Continue with what has arrived: the awaited draft is late."""
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
        now = self.recorder.last_token_at or self.recorder.received_at
        self.recorder.plain_tok_s, self.recorder.plain_age_s = self.planner.report_plain(now)
        return [*self._close(), Finish(reason, error)]

    def _close(self) -> list[Action]:
        actions: list[Action] = [ToVerifier(CloseSequence(sequence=self.number))]
        if self._limits.has_drafter:
            self._limits.has_drafter = False
            actions.append(ToDrafter(CloseSequence(sequence=self.number)))
        self.current.forget()
        return actions
