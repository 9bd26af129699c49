"""Two models that know only the last token, and a stack that answers with them.

The laws are known, so answers can be held against them. Verifier and drafter use what the
real ones use (`protocol.decoding`, `services.sampling.candidates`, the real drafter
service); wires, clocks and deaths are those of chance.
"""

from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, product
from random import Random

import msgspec
import numpy as np

from orchestrator.sequence.limits import Limits
from orchestrator.sequence.planner import Planner
from orchestrator.sequence.sequence import (
    Action,
    Emit,
    Phase,
    Sequence,
    ToDrafter,
    ToVerifier,
)
from orchestrator.telemetry.recorder import Recorder
from protocol.decoding.rejection import verify_draft
from protocol.decoding.sampler import Floats, sample
from protocol.decoding.sampling_params import drafter_sampling, uses_rejection
from protocol.decoding.token_tree import TokenTree
from protocol.decoding.tokens import common_prefix_length
from protocol.messages import (
    CloseSequence,
    DraftDistribution,
    DraftTree,
    FromService,
    Mode,
    OpenSequence,
    Sampling,
    Tokens,
    VerificationOutcome,
    Verify,
)
from services.drafter.backends.base import (
    DEFAULT_ROUND_OPTIONS,
    BackendIdentity,
    DraftedToken,
    Outcome,
    RoundOptions,
    TreeLayer,
    to_layer,
)
from services.drafter.backends.growth import draft_tokens
from services.drafter.drafter import Drafter
from services.sampling.candidates import best_bonuses, best_of
from tests.protocol.decoding.test_sampler import allowed, softmax
from tests.support.fakes import judged

SIZE = 3
START = 0
_RANDOM = np.random.default_rng(8)
TARGET: Floats = (_RANDOM.normal(size=(SIZE, SIZE)) * 1.2).astype(np.float32)
"""[last token, next token] logits."""
DRAFT: Floats = (TARGET + _RANDOM.normal(size=(SIZE, SIZE)) * 0.9).astype(np.float32)


def law_of_answers(sampling: Sampling, length: int) -> dict[tuple[int, ...], float]:
    """Each answer's probability under plain decoding."""
    rows = []
    for row in TARGET:
        keep = allowed(row, sampling)
        law = np.zeros(SIZE)
        law[keep] = softmax(row[keep] / sampling.temperature)
        rows.append(law)
    found = {}
    for answer in product(range(SIZE), repeat=length):
        steps = zip((START, *answer), answer, strict=False)
        found[answer] = float(np.prod([rows[last][token] for last, token in steps]))
    return found


class MarkovBackend:
    """A drafter whose model is `DRAFT`. It drafts chains only, and says so."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._sampling = Sampling()
        self._tokens: Tokens = []

    @property
    def identity(self) -> BackendIdentity:
        return BackendIdentity("markov", "", "", SIZE, 0, "cpu", 64)

    def open(self, sequence: int, tokens: Tokens, sampling: Sampling) -> Generator[None]:
        self._sampling = drafter_sampling(sampling)
        self._tokens = list(tokens)
        yield

    def commit(self, sequence: int, base: int, tokens: Tokens) -> None:
        self._tokens[base:] = tokens

    def prepare(
        self,
        sequence: int,
        tree: TokenTree,
        fan_out: list[int],
        depth: int,
        turn: RoundOptions = DEFAULT_ROUND_OPTIONS,
    ) -> Generator[TreeLayer]:
        roots, chain = [], tree.tokens
        for accepted, wanted in enumerate(fan_out):
            position = len(self._tokens) + accepted + 1
            top = best_of(DRAFT[chain[accepted]][None], SIZE, None)
            best = best_bonuses(top, position, self._sampling).tolist()
            rejected = [*chain, None][accepted + 1]
            roots += [Outcome(accepted, t) for t in best if t != rejected][:wanted]
        tokens = [root.bonus for root in roots]
        for level in range(depth):
            at = [len(self._tokens) + root.accepted + 2 + level for root in roots]
            found = self._next(tokens, at, turn)
            tokens = [one.token for one in found]
            laws = [one.distribution for one in found if one.distribution.tokens]
            yield TreeLayer(roots, tokens, [one.confidence for one in found], laws)

    def draft(
        self, sequence: int, pending: int, count: int, turn: RoundOptions = DEFAULT_ROUND_OPTIONS
    ) -> Generator[TreeLayer]:
        for level in range(count):
            [found] = self._next([pending], [len(self._tokens) + 1 + level], turn)
            yield to_layer(found)
            pending = found.token

    def _next(self, tokens: Tokens, positions: list[int], turn: RoundOptions) -> list[DraftedToken]:
        return draft_tokens(
            best_of(DRAFT[tokens], self._width, None), positions, self._sampling, turn
        )

    def close(self, sequence: int) -> None:
        pass


def spoilt(tree: DraftTree, random: Random) -> DraftTree:
    """What a hostile drafter makes of it: no law fits its token."""

    def worse(law: DraftDistribution, token: int) -> DraftDistribution:
        return random.choice(
            [
                DraftDistribution(law.tokens, law.probabilities[:-1]),
                DraftDistribution([t + 1000 for t in law.tokens], law.probabilities),
                DraftDistribution(law.tokens, [0.9 for _ in law.tokens]),
                DraftDistribution([*law.tokens, token], [*law.probabilities, 0.0]),
                DraftDistribution([*law.tokens, 10**6], [*law.probabilities, 0.0]),
            ]
        )

    laws = [worse(law, token) for law, token in zip(tree.distributions, tree.tokens, strict=True)]
    return msgspec.structs.replace(tree, distributions=laws)


@dataclass(frozen=True)
class Setting:
    """How an answer is made."""

    sampling: Sampling
    mode: Mode = "ssd"
    num_draft_tokens: int = 0
    budget: int = 4
    width: int = SIZE
    """Tokens that the drafter draws from."""
    deaths: float = 0.0
    """How often somebody dies, per event."""
    hostile: bool = False
    drafter: bool = True
    prompt: tuple[int, ...] = (START,)
    """Ends with START, which is all that the models know of it."""


class Answering:
    """One answer, decoded until it has `length` tokens."""

    def __init__(self, setting: Setting, seed: int) -> None:
        self._setting = setting
        self._sampling = msgspec.structs.replace(setting.sampling, seed=seed)
        self._random = Random(seed)  # noqa: S311  # no secret depends on it
        self._kv: Tokens = []
        self._verify: Verify | None = None
        self._drafter = Drafter(MarkovBackend(setting.width))
        self._work: Iterator[FromService | None] = iter(())
        self.answer: Tokens = []
        estimates = judged()
        # Costs at which it depends on the drafter's confidence what is worth verifying.
        for tokens in range(1, 7):
            estimates.verify_latency.observe(tokens, 10.0 + 5.0 * (tokens - 1))
        self.sequence = Sequence(
            number=1,
            prompt=list(setting.prompt),
            sampling=self._sampling,
            limits=Limits(64, frozenset(), 0, SIZE),
            planner=Planner(
                setting.mode,
                estimates,
                setting.num_draft_tokens,
                setting.budget,
                sampled=uses_rejection(self._sampling),
            ),
            recorder=Recorder(0.0),
        )

    def run(self, length: int) -> tuple[int, ...]:
        self._do(self.sequence.on_verifier_up(64))
        if self._setting.drafter:
            self._do(self.sequence.on_drafter_up(0))
            self.sequence.on_drafter_filled()
        while len(self.answer) < length:
            if self._random.random() < self._setting.deaths:
                self._somebody_dies()
            elif self.sequence.phase is Phase.DRAFTING or self._random.random() < 0.7:
                self._drafter_works()
            else:
                self._verification_ends()
        return tuple(self.answer[:length])

    def _do(self, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case ToVerifier(OpenSequence(tokens=tokens)):
                    self._kv = list(tokens)
                case ToVerifier(Verify() as verify):
                    self._verify = verify
                case ToDrafter(CloseSequence()) | ToVerifier():
                    pass
                case ToDrafter(message):
                    work = self._drafter.handle(message)
                    if isinstance(message, OpenSequence):
                        list(work)
                    else:  # its tokens count even if nothing comes of it
                        self._work = chain([next(work, None)], work)
                case Emit(tokens):
                    self.answer += tokens

    def _drafter_works(self) -> None:
        tree = next(self._work, None)
        if isinstance(tree, DraftTree):
            if self._setting.hostile:
                tree = spoilt(tree, self._random)
            self._do(self.sequence.on_tree(tree, 0.0))
        elif self.sequence.phase is Phase.DRAFTING:
            self._do(self.sequence.on_draft_late())
        else:
            self._verification_ends()

    def _verification_ends(self) -> None:
        verify, self._verify = self._verify, None
        if verify is None:
            return
        assert verify.position == len(self._kv)
        rows, draft = TARGET[verify.nodes], verify.nodes[1:]
        if uses_rejection(self._sampling):
            assert len(verify.distributions) in (0, len(draft))
            accepted, bonus = verify_draft(
                rows, draft, verify.distributions, verify.position + 1, self._sampling
            )
        else:
            assert verify.distributions == []
            first = verify.position + 1
            chosen = sample(rows, range(first, first + len(rows)), self._sampling)
            accepted = common_prefix_length(draft, chosen)
            bonus = chosen[accepted]
        self._kv += verify.nodes[: accepted + 1]
        cost = 10.0 + 5.0 * len(draft)
        self._do(
            self.sequence.decide(
                VerificationOutcome(
                    sequence=1,
                    round=verify.round,
                    accepted=accepted,
                    bonus=bonus,
                    verify_ms=cost,
                    idle_ms=0.0,
                ),
                0.0,
            )
        )
        self._do(self.sequence.record(0.0))

    def _somebody_dies(self) -> None:
        if self._random.random() < 0.5:
            self._work = iter(())
            self._do(self.sequence.on_drafter_lost("drafter_died"))
            if self._setting.drafter:
                self._do(self.sequence.on_drafter_up(0))
                self.sequence.on_drafter_filled()
        else:  # what it has decided dies with it
            self._verify = None
            self.sequence.on_verifier_lost()
            self._do(self.sequence.on_verifier_up(64))
