"""The target model: prefill, and verification of draft trees in one forward pass.

Trees of several sequences that wait at the same time share a pass (`engine`).
"""

import contextlib
import time
from collections.abc import Callable, Generator, Sequence
from functools import partial

from msgspec.structs import replace

from protocol.decoding.token_tree import TokenTree
from protocol.errors import ProtocolError, RuntimeFailure
from protocol.messages import (
    CloseSequence,
    Extend,
    FromService,
    OpenSequence,
    Prefilled,
    PrefillProgress,
    ReadTarget,
    Revoke,
    Tokens,
    VerificationOutcome,
    Verify,
)
from services.engine.chunked_prefill import ChunkedPrefill
from services.engine.pass_memory import PassMemory
from services.engine.runner import ModelRunner
from services.engine.scheduler import Scheduler
from services.engine.target_model import TargetModel, prepare
from services.kernels.cpu.library import use_spare_cores
from services.kernels.register import kernels
from services.kv.budget import KVSize, KVTokens, count_kv_tokens, measure_kv
from services.kv.cache import KVStore
from services.kv.prefix_cache import CachedPrefix, PrefixCache
from services.kv.state import SequenceState
from services.mlx.loader import LoadedModel
from services.runtime.idle_flag import IdleFlag
from services.runtime.inbox import Work
from services.runtime.sequence_table import TRIAL_SEQUENCE, SequenceTable
from services.verifier.acceptance import AcceptanceRule, describe_outcome
from services.verifier.feature_source import FeatureSource
from services.verifier.sequence import TargetSequence

MAX_DRAFT_TOKENS = 64
ExternalFill = Callable[[SequenceState, Tokens, Tokens], Generator[None]]
"""Fills an empty state with a prompt, the third, and appends its tokens to the second."""

_PROGRESS_S = 0.5
"""Interval of progress reports for a long prompt."""


class SpareCores:
    """The drafter's cores, on which the target also computes while the drafter is idle.

    Args:
        cores: none if the drafter has no cores of its own.
        flag: the drafter's; without it, its cores are left alone while anything is prepared.
    """

    def __init__(self, cores: Sequence[int] = (), flag: IdleFlag | None = None) -> None:
        self.cores, self._flag = tuple(cores), flag

    def begin_pass(self, *, drafter_idle: bool) -> None:
        """Use the cores from now on: always, or only while the drafter is idle.

        Args:
            drafter_idle: True if it has no request during this pass.
        """
        if drafter_idle:
            use_spare_cores(self.cores)
        elif self._flag is None:
            use_spare_cores(())
        else:
            # It is about to be woken, and would have to wait for a helper that has started a part.
            self._flag.is_idle = False
            use_spare_cores(self.cores, self._flag.word)


class Verifier:
    """Verifies trees; between two rounds a sequence holds exactly the committed tokens."""

    def __init__(
        self,
        model: LoadedModel,
        prefill_step_size: int,
        prompts: PrefixCache | None = None,
        target: TargetModel | None = None,
        *,
        prelaunches: bool = False,
    ) -> None:
        self._model, self._folder = model.module, model.folder
        self.target = target if target is not None else prepare(model.module)
        self.max_draft_tokens = MAX_DRAFT_TOKENS if self.target.states.rewinds else 0
        """Longest draft that can be verified; 0 if the model's state cannot be rewound."""
        self._prompts = prompts if prompts is not None else PrefixCache()
        self.fill_externally: ExternalFill | None = None
        """Lets another device compute a prompt where that is faster: `ExternalPrefill.fill`."""
        self._sequences: SequenceTable[TargetSequence] = SequenceTable()
        self.features = FeatureSource(self._model, self.target.trial)
        self._kv_size = KVSize(0, 0)
        memory = self._memory = None
        if self.target.verify is self._model:  # whole; cached prefixes give way to passes
            size = self._kv_size = measure_kv(self._model, self.target.states.make)
            reckon = partial(PassMemory, self._model, size, self._prompts.drop_oldest)
            memory, self._memory = reckon(logits=True), reckon(logits=False)
        runner = ModelRunner(self.target.verify, memory=memory)
        filler = ModelRunner(self.target.prefill, memory=self._memory)
        runner.one_graph = filler.one_graph = prelaunches
        self._chunked_prefill = ChunkedPrefill(
            filler,
            prefill_step_size,
            checkpoints=self._prompts.is_enabled,
            end_ids=model.end_ids,
            log=self.features.log,
        )
        self.scheduler = Scheduler(runner, self._sequences, self._chunked_prefill.prompts)
        self.scheduler.pipelines = self.target.pipelines
        self.use(self.target)
        self._revoked: dict[int, int] = {}  # by sequence: see `Revoke.round`
        self.spare_cores = SpareCores()

    def use(self, target: TargetModel) -> None:
        """Compute with these abilities and traces from the next pass on; no sequence is open."""
        self.target, scheduler = target, self.scheduler
        self.takes_trees = target.takes_trees
        """True if drafts may branch."""
        scheduler.queue.most_rows = kernels().most_shared_rows if target.shares_passes else 0
        scheduler.runner.traced, scheduler.runner.table = target.traced, target.table
        self._chunked_prefill.share(target.table, prompts=target.shares_prompts)

    def kv_tokens(self, kv_bytes: int) -> KVTokens:
        """Return the tokens of KV for all open sequences in this much memory (`kv.budget`)."""
        return count_kv_tokens(self._kv_size, kv_bytes)

    def supersedes(self, news: Work, current: Work) -> bool:
        """Return True if `news` closes or reopens the sequence, making `current` pointless."""
        return (
            isinstance(current, OpenSequence | Verify)
            and isinstance(news, OpenSequence | CloseSequence)
            and news.sequence == current.sequence
        )

    def handle(self, message: Work) -> Generator[FromService | None]:
        """Answer one message (see `work_queue.Service`)."""
        if self.scheduler.prelauncher is not None and not isinstance(message, Extend | Revoke):
            is_next = isinstance(message, Verify)
            self.scheduler.prelauncher.keep_for(message.sequence if is_next else None)
        if message.sequence != TRIAL_SEQUENCE:
            self._sequences.pop(TRIAL_SEQUENCE, None)
        match message:
            case OpenSequence():
                yield from self._open(message)
            case Verify():
                yield from self._verify(message)
            case Revoke():
                self._revoked[message.sequence] = message.round
            case Extend():
                if (extended := self._sequences.get(message.sequence)) is not None:
                    extended.extend(message)
            case CloseSequence():
                self._revoked.pop(message.sequence, None)
                self._retire(message.sequence)
            case ReadTarget():
                yield from self._read(message)
            case _:
                raise ProtocolError(f"a verifier cannot handle {type(message).__name__}")

    def linger_s(self, message: Work) -> float:
        """Return a short wait for the other sequences of the last pass, which are expected soon."""
        return self.scheduler.linger_s(message.sequence)

    def _retire(self, number: int) -> None:
        """Drop a sequence, but for the prefix that others may fork."""
        sequence = self._sequences.pop(number, None)
        if sequence is not None and number != TRIAL_SEQUENCE:
            self._keep(sequence)

    def has_open(self, number: int) -> bool:
        """Return True if this sequence is open."""
        return number in self._sequences

    @property
    def is_computing(self) -> bool:
        """True if a prompt or a verification is in work."""
        requests = any(one.request is not None for one in self._sequences.values())
        return requests or bool(self._chunked_prefill.prompts)

    def retire_all(self) -> None:
        """Drop all sequences, even in the middle of a pass: their committed tokens are kept."""
        self._revoked.clear()
        if self.scheduler.prelauncher is not None:
            self.scheduler.prelauncher.call_off()
        for number in list(self._sequences):
            self._retire(number)

    def new_state(self) -> SequenceState:
        """Return an empty state for a sequence of this model."""
        return self.target.states.make()

    def _keep(self, sequence: TargetSequence) -> None:
        if sequence.state.length > len(sequence.tokens):
            sequence.state.commit(len(sequence.tokens))  # it was in the middle of a pass
        if self._prompts.is_enabled and isinstance(sequence.state, KVStore):
            sequence.state.gather()
        self._prompts.keep(CachedPrefix(sequence.tokens, sequence.state))
        self.features.keep(sequence)

    def _new_sequence(self, message: OpenSequence) -> Generator[None, None, TargetSequence]:
        """Return the sequence, with the part of its prompt that is or will soon be cached."""
        rule = AcceptanceRule(message, self._folder)
        state = self._fork(message.tokens)
        if self._chunked_prefill.is_coming(message.tokens, state.length):
            while self._chunked_prefill.is_coming(message.tokens, state.length):
                yield
            state = self._fork(message.tokens)
        tokens = message.tokens[: state.length]
        log = self.features.begin(tokens, self._sequences.values())
        return TargetSequence(state=state, rule=rule, tokens=tokens, features=log)

    def expect_s(self) -> float:
        """Return how long the next chunk of a prompt takes; 0 if no prompt is in work."""
        return (
            self._chunked_prefill.chunk_sizer.expected_s if self._chunked_prefill.prompts else 0.0
        )

    def _fork(self, tokens: Tokens) -> SequenceState:
        """Fork the state with the longest resumable prefix of these tokens."""
        running = [CachedPrefix(s.tokens, s.state) for s in self._sequences.values()]
        state = self._prompts.fork(tokens, running)
        return state if state is not None else self.new_state()

    def _open(self, message: OpenSequence) -> Generator[FromService | None]:
        started = time.perf_counter()
        self._retire(message.sequence)
        sequence = yield from self._new_sequence(message)
        cached = sequence.state.length
        if self._memory is not None:
            self._memory.check_prompt(cached, len(message.tokens))
        try:
            with self._chunked_prefill.register(message.sequence, message.tokens):
                yield from self._prefill(message.sequence, sequence, message.tokens)
        except GeneratorExit:
            self._keep(sequence)  # a repeated request need not start anew
            raise
        self._sequences[message.sequence] = sequence
        yield from self.features.messages(message.sequence, sequence)
        yield Prefilled(
            sequence=message.sequence,
            length=sequence.state.length,
            prefill_ms=1e3 * (time.perf_counter() - started),
            cached=cached,
        )

    def _read(self, message: ReadTarget) -> Generator[FromService | None]:
        """Send these features from now on, starting with those available."""
        before = self.features.request
        try:
            self.features.configure(message.features, message.number)
        finally:
            if self.features.request != before:
                read = None if self.features.request is None else self.features.take
                self.scheduler.runner.read = self._chunked_prefill.runner.read = read
                self.target.read(self.features)
                for sequence in self._sequences.values():
                    sequence.forget_features()
        for number, sequence in self._sequences.items():
            yield from self.features.messages(number, sequence)

    def _prefill(
        self, number: int, sequence: TargetSequence, tokens: Tokens
    ) -> Generator[PrefillProgress | None]:
        """Compute these tokens in pieces, reporting progress from time to time."""
        cached = reported = sequence.state.length
        reported_at = time.perf_counter()
        if self.fill_externally is not None:
            yield from self.fill_externally(sequence.state, sequence.tokens, tokens)
        pieces = self._chunked_prefill.fill(number, sequence, tokens, lambda: not self._sequences)
        with contextlib.closing(pieces):
            self.spare_cores.begin_pass(drafter_idle=True)
            for _ in pieces:
                now = self.scheduler.idle_since = time.perf_counter()
                is_due = now - reported_at >= _PROGRESS_S
                if is_due and reported < sequence.state.length < len(tokens):
                    reported, reported_at = sequence.state.length, now
                    yield PrefillProgress(sequence=number, length=reported, cached=cached)
                yield None
                self.spare_cores.begin_pass(drafter_idle=True)

    def _verify(self, message: Verify) -> Generator[FromService | None]:
        sequence, tree = self._validate(message)
        scheduler = self.scheduler
        busy_since, longest_s = scheduler.last_pass.started, scheduler.longest_wait_s
        sequence.on_request(time.perf_counter(), busy_since, longest_s)
        sequence.begin_run(message)
        try:
            while sequence.request is not None:
                if self._revoked.get(message.sequence, 0) >= sequence.granted_in:
                    sequence.request = replace(sequence.request, granted=0)
                outcome = yield from self._judge(sequence, sequence.request, tree)
                sequence.advance_run(outcome)
                yield outcome
                if sequence.request is not None:
                    _, tree = self._validate(sequence.request)
        finally:
            sequence.end_run()

    def _judge(
        self, sequence: TargetSequence, message: Verify, asked: TokenTree
    ) -> Generator[FromService | None, None, VerificationOutcome]:
        """Run the requested verification, and start the next pass if its token is granted."""
        tree = sequence.rule.drop_impossible(message, asked)
        if self.spare_cores.cores:
            drafter_idle = all(one.drafter_idle for one in self._sequences.values())
            self.spare_cores.begin_pass(drafter_idle=drafter_idle)
        try:
            handle, tokens = yield from self.scheduler.run(sequence, tree)
            judged = sequence.rule.accept(handle.logits, message, tree, tokens)
            sequence.commit(tree, judged.rows)
            rows = None if handle.features is None else handle.read_features(judged.rows)
            read = self.features.log(sequence, message.position, rows) if rows is not None else None
        except RuntimeFailure:
            sequence.state.commit(len(sequence.tokens))
            self._sequences.pop(message.sequence, None)  # its state is no longer usable
            raise
        self.scheduler.record(handle.timing)
        sequence.answered_at = self.scheduler.idle_since
        if read is not None:
            yield self.features.message(message.sequence, message.position, read)
        node = None if asked.is_chain else asked.find(sequence.tokens[message.position + 1 :])
        return describe_outcome(message, judged, handle.timing, node)

    def _validate(self, message: Verify) -> tuple[TargetSequence, TokenTree]:
        """Return the sequence and the tree to be verified, or raise ProtocolError."""
        sequence = self._sequences[message.sequence]
        most = 1 + self.max_draft_tokens
        return sequence, sequence.validate(message, most, takes_trees=self.takes_trees)
