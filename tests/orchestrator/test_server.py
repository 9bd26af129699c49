"""The orchestrator's loop between fake hubs: who is told what, and what must not end it."""

from collections import deque
from typing import Any, Generic, TypeVar

import msgspec
import pytest

from orchestrator.requests.crash_journal import CrashJournal
from orchestrator.requests.request import Request
from orchestrator.server import Orchestrator
from orchestrator.text.prompt_encoder import PromptEncoder, PromptLimits
from protocol.decoding.vocabulary import Vocabulary
from protocol.errors import ProtocolError
from protocol.messages import (
    PROTOCOL_VERSION,
    Cancel,
    CloseSequence,
    DraftNow,
    DraftTree,
    EncodePrompt,
    Failed,
    FeatureRequest,
    Features,
    Finished,
    FromService,
    Generate,
    Heartbeat,
    Hello,
    Identify,
    Message,
    OpenSequence,
    Prefilled,
    PrefillProgress,
    Prepare,
    Progress,
    ReadTarget,
    Rejected,
    ServiceDown,
    Status,
    StatusRequest,
    Stop,
    Text,
    ToOrchestrator,
    ToVerifier,
    VerificationOutcome,
    Verify,
    Welcome,
)
from protocol.settings import OrchestratorSettings
from protocol.transport.codec import Decoder, encode
from tests.support.fakes import judged

VERIFIER = Hello(
    protocol=PROTOCOL_VERSION,
    role="verifier",
    pid=11,
    backend="mlx",
    model="large",
    tokenizer_fingerprint="f00d",
    vocabulary_size=100,
    context_length=0,
    compute_unit="metal",
    max_draft_tokens=64,
)
DRAFTER = msgspec.structs.replace(
    VERIFIER, role="drafter", pid=12, model="small", compute_unit="cpu_and_ne"
)

Inbound = TypeVar("Inbound", bound=Message)
M = TypeVar("M", bound=Message)


class ScriptIsOver(Exception):  # no error: how an endless loop ends in a test
    """Everything that was said has been heard."""


TO_VERIFIER: Decoder[Message] = Decoder(ToVerifier)


class FakeHub(Generic[Inbound]):
    """A hub whose peers are strings, and whose messages go through the real codec."""

    def __init__(self, decoder: Decoder[Inbound]) -> None:
        self._decoder = decoder
        self.inbox: deque[tuple[bytes, Message]] = deque()
        self.sent: list[tuple[bytes, Message]] = []
        self.gone: set[bytes] = set()
        self.accepted: set[bytes] = set()
        self.dropped = 0

    def accept(self, peer: bytes) -> None:
        self.accepted.add(peer)

    def send(self, peer: bytes, message: Message | bytes) -> bool:
        if isinstance(message, bytes):
            message = TO_VERIFIER.decode(message)
        self.sent.append((peer, message))
        self.dropped += peer in self.gone
        return peer not in self.gone

    def keep_bound(self, now: float) -> None:
        assert now >= 0.0

    def receive(self) -> tuple[bytes, Inbound | ProtocolError] | None:
        if not self.inbox:
            return None
        peer, message = self.inbox.popleft()
        try:
            return peer, self._decoder.decode(encode(message))
        except ProtocolError as error:
            return peer, error


class FakePoller:
    """Waits for nothing."""

    def __init__(self, hubs: list[FakeHub[Any]]) -> None:
        self._hubs = hubs

    def add_reader(self, descriptor: int) -> None:
        assert descriptor >= 0

    def wait(self, timeout_s: float) -> None:
        assert timeout_s >= 0.0
        if not any(hub.inbox for hub in self._hubs):
            raise ScriptIsOver


class FakeTokenizer:
    """Every token is one letter, and every conversation the same three tokens."""

    stop_ids = frozenset({99})
    parse_special = False

    def encode_prompt(self, prompt: EncodePrompt) -> list[int]:
        return [1, 2, 3]

    def stream(self, *, marks: bool = False) -> "FakeTokenizer":
        return self

    def push(self, token: int) -> str:
        return chr(ord("a") + token % 26)

    def end(self) -> str:
        return ""


def outcome_of(verify: Verify, **fields: Any) -> VerificationOutcome:
    """One token, which nobody drafted, unless something else is told."""
    usual: dict[str, Any] = {"accepted": 0, "bonus": 5, "verify_ms": 5.0, "idle_ms": 0.1}
    return VerificationOutcome(sequence=verify.sequence, round=verify.round, **(usual | fields))


class House:
    """An orchestrator, and everybody who talks to it."""

    def __init__(
        self,
        tokenizer: Any = None,
        journal: CrashJournal | None = None,
        prompts: Any = None,
        **settings: Any,
    ) -> None:
        settings.setdefault("concurrency", 1)
        self.services: FakeHub[FromService] = FakeHub(Decoder(FromService))
        self.clients: FakeHub[ToOrchestrator] = FakeHub(Decoder(ToOrchestrator))
        services: Any = self.services
        clients: Any = self.clients
        tokenizer = tokenizer or FakeTokenizer()
        self._orchestrator = Orchestrator(
            OrchestratorSettings(
                lifeline=0,
                services_address="",
                clients_address="",
                run_dir="",
                model="large",
                **settings,
            ),
            services=services,
            clients=clients,
            tokenizer=tokenizer,
            prompts=prompts
            or PromptEncoder(
                tokenizer, "", PromptLimits(max_bytes=0, timeout_s=1.0, memory_bytes=0)
            ),
            journal=journal or CrashJournal(None, 2),
            vocabulary=Vocabulary("f00d", 100),
            pid=1,
        )
        judged(self._orchestrator._estimates)

    def service(self, peer: bytes, message: Message) -> None:
        self.services.inbox.append((peer, message))
        self.settle()

    def client(self, message: Message, peer: bytes = b"c") -> None:
        self.clients.inbox.append((peer, message))
        self.settle()

    def settle(self) -> None:
        with pytest.raises(ScriptIsOver):
            self._orchestrator.run()

    @property
    def running(self) -> list[Request]:
        """The requests that are answered."""
        return list(self._orchestrator._requests.running.values())

    def told(self, peer: bytes, kind: type[M]) -> list[M]:
        """What a peer was sent of one kind."""
        sent = [*self.services.sent, *self.clients.sent]
        return [message for to, message in sent if to == peer and isinstance(message, kind)]

    def verified(self, accepted: int, bonus: int, verify_ms: float = 5.0) -> None:
        """The verifier answers the last Verify."""
        fields = {"accepted": accepted, "bonus": bonus, "verify_ms": verify_ms}
        self.service(b"v", outcome_of(self.told(b"v", Verify)[-1], **fields))

    def drafted(self, token: int, confidence: float = 0.9, *, bonus: int = 5) -> None:
        """The drafter answers the last Prepare with one branch, for this bonus token."""
        prepare = self.told(b"d", Prepare)[-1]
        self.service(
            b"d",
            DraftTree(
                sequence=prepare.sequence,
                round=prepare.round,
                depth=1,
                outcomes=[(0, bonus)],
                tokens=[token],
                confidences=[confidence],
                draft_ms=1.0,
            ),
        )

    def drafting(self, confidence: float) -> None:
        """The drafter answers the last DraftNow."""
        draft_now = self.told(b"d", DraftNow)[-1]
        self.service(
            b"d",
            DraftTree(
                sequence=draft_now.sequence,
                round=draft_now.round,
                depth=1,
                outcomes=[(draft_now.accepted, draft_now.pending)],
                tokens=[6],
                confidences=[confidence],
                draft_ms=1.0,
            ),
        )


@pytest.fixture(autouse=True)
def _no_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchestrator.server.Poller", FakePoller)


@pytest.fixture
def house() -> House:
    """With both services."""
    house = House()
    house.service(b"v", VERIFIER)
    house.service(b"d", DRAFTER)
    return house


def ask(request: int = 1, **fields: Any) -> Generate:
    return Generate(request=request, tokens=[1, 2, 3], **fields)


def test_services_are_welcomed(house: House) -> None:
    """Each fitting service is welcomed, and the status names both."""
    assert [Welcome()] == house.told(b"v", Welcome)
    assert [Welcome()] == house.told(b"d", Welcome)
    house.client(StatusRequest())
    (status,) = house.told(b"c", Status)
    assert [service.pid for service in status.services] == [11, 12]


def test_the_status_tells_of_the_requests_in_hand(house: House) -> None:
    """What each request waits for and has, what all did of late, and what is planned."""
    house.client(ask(max_tokens=3, num_draft_tokens=2))
    house.client(StatusRequest())
    (sequence,) = house.told(b"c", Status)[-1].sequences
    assert (sequence.state, sequence.prompt_tokens, sequence.tokens) == ("prefill", 3, 0)
    (opened,) = house.told(b"v", OpenSequence)
    house.service(b"v", Prefilled(sequence=opened.sequence, length=2, prefill_ms=1.0, cached=1))
    house.drafted(6)
    house.verified(0, 5)
    house.client(StatusRequest())
    status = house.told(b"c", Status)[-1]
    (sequence,) = status.sequences
    assert (sequence.state, sequence.cached_tokens, sequence.tokens, sequence.hit_rate) == (
        "verify",
        1,
        1,
        1.0,
    )
    assert (sequence.planner.num_draft_tokens, sequence.planner.speculating) == (2, True)
    assert (status.window.tokens, status.window.rounds, status.window.cache_hits) == (1, 1, 1)
    house.verified(1, 7)
    house.client(StatusRequest())
    status = house.told(b"c", Status)[-1]
    assert status.sequences == []
    assert (status.window.tokens, status.window.requests) == (3, 1)
    assert status.window.acceptance_rate == 1.0


def test_the_status_of_plain_decoding(house: House) -> None:
    """Who asked for no drafts is told of none, whatever others would get."""
    house.client(ask(mode="ar"))
    house.client(StatusRequest())
    status = house.told(b"c", Status)[-1]
    (sequence,) = status.sequences
    assert (sequence.planner.mode, sequence.planner.speculating) == ("ar", False)
    assert (sequence.planner.num_draft_tokens, sequence.planner.branches) == (0, 0)
    assert status.planner.speculating
    assert status.planner.num_draft_tokens > 0
    assert status.planner.branches > 0


def test_a_request_is_answered(house: House) -> None:
    """Tokens and text arrive as they are verified, then the end with its statistics."""
    house.client(ask(max_tokens=3, num_draft_tokens=2))
    house.drafted(6)
    house.verified(0, 5)
    assert house.told(b"v", Verify)[-1].nodes == [5, 6]
    house.verified(1, 7)
    texts = house.told(b"c", Text)
    assert [text.tokens for text in texts] == [[5], [6, 7]]
    assert [text.origins for text in texts] == [["target"], ["hit", "target"]]
    assert "".join(text.text for text in texts) == "fgh"
    (finished,) = house.told(b"c", Finished)
    assert (
        finished.reason,
        finished.prompt_tokens,
        finished.statistics.cache_hits,
    ) == ("length", 3, 1)


def test_the_time_to_the_next_verification_is_measured_after_each_hit(house: House) -> None:
    house.client(ask(num_draft_tokens=1, branches=16))
    prepare = house.told(b"d", Prepare)[-1]
    tree = DraftTree(
        sequence=prepare.sequence,
        round=prepare.round,
        depth=1,
        outcomes=[(0, token) for token in range(1, 17)],
        tokens=list(range(21, 37)),
        confidences=[0.9] * 16,
        draft_ms=1.0,
    )
    house.service(b"d", tree)
    [request] = house.running
    house.verified(0, 16)
    assert house.told(b"v", Verify)[-1].nodes == [16, 36]
    assert len(request.sequence.recorder.phases["dispatch"]) == 1


def test_a_misfit_is_refused(house: House) -> None:
    """A service with another vocabulary is told why, and the status repeats it."""
    house.service(b"x", msgspec.structs.replace(DRAFTER, tokenizer_fingerprint="beef", pid=13))
    (refusal,) = house.told(b"x", Rejected)
    assert "numbers its 100 tokens differently" in refusal.reason
    house.client(StatusRequest())
    assert house.told(b"c", Status)[-1].refused == {"drafter": refusal.reason}


def test_a_replaced_drafter_is_stopped_and_ignored(house: House) -> None:
    """The newcomer takes over the open requests; what the old one still says is dropped."""
    house.client(ask())
    house.service(b"e", msgspec.structs.replace(DRAFTER, pid=14))
    assert [Stop()] == house.told(b"d", Stop)
    assert len(house.told(b"e", OpenSequence)) == len(house.told(b"e", Prepare)) == 1
    house.drafted(6)
    house.verified(0, 5)
    assert house.told(b"v", Verify)[-1].nodes == [5]


def test_an_older_process_does_not_take_the_place_of_a_younger(house: House) -> None:
    """Of two drafters that introduce themselves to a new orchestrator, the swap's new one stays."""
    house.service(b"e", msgspec.structs.replace(DRAFTER, pid=14, started_ns=2))
    house.client(ask())
    house.service(b"o", msgspec.structs.replace(DRAFTER, pid=13, started_ns=1))
    assert [Stop()] == house.told(b"o", Stop)
    assert house.told(b"e", Stop) == house.told(b"o", Welcome) == []
    house.service(b"n", msgspec.structs.replace(DRAFTER, pid=15, started_ns=3))
    assert [Stop()] == house.told(b"e", Stop)
    house.service(b"u", msgspec.structs.replace(DRAFTER, pid=16))  # of unknown age
    assert [Stop()] == house.told(b"n", Stop)


def test_requests_wait_in_line(house: House) -> None:
    """One request is decoded at a time; the next starts when it ends, in order."""
    for request in (1, 2, 3):
        house.client(ask(request, max_tokens=1, mode="ar"))
    for _ in range(3):
        house.verified(0, 5)
    assert [finished.request for finished in house.told(b"c", Finished)] == [1, 2, 3]


def test_a_long_line_is_closed() -> None:
    """With the line full, a request is refused at once."""
    house = House(max_waiting=1)
    house.client(ask(1))
    house.client(ask(2))
    house.client(ask(3))
    (refusal,) = house.told(b"c", Rejected)
    assert "try again later" in refusal.reason


def test_waiting_requests_can_be_cancelled(house: House) -> None:
    """A request that is still in line is cancelled without ever reaching the verifier."""
    house.client(ask(1))
    house.client(ask(2))
    house.client(Cancel(request=2))
    assert [(f.reason, f.request) for f in house.told(b"c", Finished)] == [("cancelled", 2)]
    assert len(house.told(b"v", OpenSequence)) == 1


def test_a_client_that_is_gone_frees_its_place(house: House) -> None:
    """A request whose client does not read any more is cancelled, and the next one starts."""
    house.client(ask(1), peer=b"gone")
    house.client(ask(2))
    house.clients.gone.add(b"gone")
    house.verified(0, 5)
    assert len(house.told(b"v", OpenSequence)) == 2


def test_a_late_draft_is_not_waited_for() -> None:
    """When the deadline of a draft passes, the target goes on with what there is."""
    house = House(draft_timeout_s=1e-9)
    house.service(b"v", VERIFIER)
    house.service(b"d", DRAFTER)
    house.client(ask(mode="sd"))
    house.service(b"d", Prefilled(sequence=1, length=2, prefill_ms=1.0))
    house.verified(0, 5)
    draft_now, stop = house.told(b"d", DraftNow)
    assert draft_now.count > stop.count == 0
    assert house.told(b"v", Verify)[-1].nodes == [5]


def test_a_failing_drafter_costs_only_speed(house: House) -> None:
    """A drafter's failure on a sequence leaves the request with plain decoding."""
    house.client(ask(max_tokens=2))
    house.service(b"d", Failed(sequence=1, error="out of memory"))
    house.verified(0, 5)
    house.verified(0, 6)
    assert [finished.reason for finished in house.told(b"c", Finished)] == ["length"]


def test_a_failing_verifier_fails_its_request(house: House) -> None:
    """The client is told the verifier's own words."""
    house.client(ask())
    house.service(b"v", Failed(sequence=1, error="out of memory"))
    (finished,) = house.told(b"c", Finished)
    assert (finished.reason, finished.error) == ("error", "the verifier failed: out of memory")


def test_a_restarted_verifier_resumes(house: House) -> None:
    """A request survives its verifier: the next one gets the committed tokens."""
    house.client(ask(max_tokens=3, mode="ar"))
    house.verified(0, 5)
    house.client(ServiceDown(role="verifier", pid=11, reason="died", final=False))
    house.service(b"v", msgspec.structs.replace(VERIFIER, pid=15))
    assert house.told(b"v", OpenSequence)[-1].tokens == [1, 2, 3]
    house.verified(0, 6)
    house.verified(0, 7)
    (finished,) = house.told(b"c", Finished)
    assert (finished.reason, finished.statistics.verifier_restarts) == ("length", 1)


def failures(house: House) -> dict[int, str]:
    """Why each request that failed did."""
    errors = {f.request: f.error for f in house.told(b"c", Finished) if f.reason == "error"}
    refused = {-1 - i: refusal.reason for i, refusal in enumerate(house.told(b"c", Rejected))}
    return errors | refused


def test_a_lost_verifier_fails_every_request(house: House) -> None:
    """Without hope of another verifier, running and waiting requests fail with the reason."""
    for request in (1, 2, 3):
        house.client(ask(request))
    house.client(ServiceDown(role="verifier", pid=11, reason="died too often", final=True))
    assert failures(house) == dict.fromkeys([1, 2, 3], "died too often")


def test_a_lost_verifier_fails_later_requests(house: House) -> None:
    """A request that comes after the verifier was lost for good is not left waiting."""
    house.client(ServiceDown(role="verifier", pid=11, reason="died too often", final=True))
    house.client(ask(7))
    (reason,) = failures(house).values()
    assert "died too often" in reason


@pytest.mark.parametrize("prompt", [list(range(10)), list(range(30))], ids=["full", "too long"])
def test_the_context_holds_whenever_the_request_comes(prompt: list[int]) -> None:
    """A prompt that the context cannot hold fails, also if it came before the verifier."""
    house = House()
    house.client(Generate(request=1, tokens=prompt))
    house.service(b"v", msgspec.structs.replace(VERIFIER, context_length=10))
    assert len(failures(house)) == 1
    assert house.told(b"v", Verify) == []


def test_the_context_ends_an_answer_whenever_its_request_came() -> None:
    """An answer stops where the context is full, also if its request came before the verifier."""
    house = House()
    house.client(ask(mode="ar"))
    house.service(b"v", msgspec.structs.replace(VERIFIER, context_length=5))
    house.verified(0, 5)
    house.verified(0, 6)
    assert [finished.reason for finished in house.told(b"c", Finished)] == ["context"]


@pytest.mark.parametrize("num_draft_tokens", [0, 2])
@pytest.mark.parametrize(
    ("token", "confidence"),
    [(6, float("nan")), (6, float("inf")), (6, -3.0), (-7, 0.9), (2**40, 0.9)],
    ids=str,
)
def test_a_drafters_nonsense_costs_only_speed(
    house: House, token: int, confidence: float, num_draft_tokens: int
) -> None:
    """Not a number, no probability, no token: the verifier sees none of it and the request ends."""
    house.client(ask(max_tokens=3, num_draft_tokens=num_draft_tokens))
    house.drafted(token, confidence)
    house.verified(0, 5)
    house.client(ServiceDown(role="drafter", pid=12, reason="died", final=True))
    house.verified(0, 6)
    house.verified(0, 7)
    assert all(0 <= t < 2**31 for verify in house.told(b"v", Verify) for t in verify.nodes)
    assert [finished.reason for finished in house.told(b"c", Finished)] == ["length"]


@pytest.mark.parametrize("verify_ms", [0.0, 1e-300])
def test_a_coarse_clock_does_no_harm(house: House, verify_ms: float) -> None:
    """A verification that took no measurable time breaks no plan."""
    house.client(ask(max_tokens=3))
    for bonus in (5, 6, 7):
        house.drafted(6)
        house.verified(0, bonus, verify_ms)
    assert [finished.reason for finished in house.told(b"c", Finished)] == ["length"]


def test_messages_of_one_turn_have_their_own_times(house: House) -> None:
    """A busy machine delivers several at once: the second token is later than the first."""
    house.client(ask(max_tokens=9, mode="ar"))
    [verify] = house.told(b"v", Verify)
    for turn in range(2):
        turned = msgspec.structs.replace(verify, round=verify.round + turn)
        outcome = outcome_of(turned, goes_on=verify.granted > 0)
        house.services.inbox.append((b"v", outcome))
    house.settle()
    [request] = house.running
    assert request.sequence.recorder.emitted == 2
    assert request.sequence.recorder.decode_s > 0.0


def test_the_next_verifications_leave_before_the_books_of_a_shared_pass() -> None:
    """The target waits for all of them, the clients for none."""
    house = House(concurrency=2)
    house.service(b"v", VERIFIER)
    for number in (1, 2):
        house.client(ask(number, max_tokens=9, mode="ar"))
    verifies = house.told(b"v", Verify)
    sent: list[tuple[bytes, Message]] = []
    house.services.sent = house.clients.sent = sent
    house.services.inbox += [(b"v", outcome_of(verify)) for verify in verifies]
    house.settle()
    assert [type(message) for _, message in sent] == [Verify, Verify, Text, Text]
    assert all(request.sequence.recorder.emitted == 1 for request in house.running)


def test_what_was_prepared_leaves_first_too() -> None:
    """A hit's next chain, which was encoded beforehand."""
    house = House(concurrency=2)
    house.service(b"v", VERIFIER)
    house.service(b"d", DRAFTER)
    for number in (1, 2):
        house.client(ask(number, max_tokens=9, num_draft_tokens=1))
        house.drafted(6)
    verifies = house.told(b"v", Verify)
    sent: list[tuple[bytes, Message]] = []
    house.services.sent = house.clients.sent = sent
    house.services.inbox += [(b"v", outcome_of(verify)) for verify in verifies]
    house.settle()
    verified = [message for _, message in sent if isinstance(message, Verify)]
    assert [message.nodes for message in verified] == [[5, 6], [5, 6]]
    kinds = [type(message) for _, message in sent]
    assert kinds.index(Text) > max(at for at, kind in enumerate(kinds) if kind is Verify)
    assert all(request.sequence.recorder.emitted == 1 for request in house.running)


def test_a_new_verifier_is_told_nothing_of_the_old_ones_books(house: House) -> None:
    """They are done before it is known: what has ended is not its to close."""
    house.client(ask(max_tokens=1, mode="ar"))
    [verify] = house.told(b"v", Verify)
    younger = msgspec.structs.replace(VERIFIER, pid=VERIFIER.pid + 10)
    house.services.inbox += [(b"v", outcome_of(verify)), (b"w", younger)]
    house.settle()
    assert len(house.told(b"v", CloseSequence)) == 1
    assert house.told(b"w", Welcome)
    assert not house.told(b"w", CloseSequence)
    assert not house.told(b"w", OpenSequence)
    assert [text.tokens for text in house.told(b"c", Text)] == [[5]]


def test_books_are_done_before_anything_else_happens_to_a_request(house: House) -> None:
    """What was verified is the client's, though the request ends with the next message."""
    house.client(ask(max_tokens=9))
    [verify] = house.told(b"v", Verify)
    failed = Failed(sequence=verify.sequence, error="no memory")
    house.services.inbox += [(b"v", outcome_of(verify)), (b"v", failed)]
    house.settle()
    assert [text.tokens for text in house.told(b"c", Text)] == [[5]]
    (finished,) = house.told(b"c", Finished)
    assert (finished.reason, finished.statistics.rounds) == ("error", 1)
    assert house.running == []


def test_only_a_verifier_says_what_was_verified(house: House) -> None:
    """An outcome that comes from the drafter is nothing."""
    house.client(ask(max_tokens=1))
    outcome = VerificationOutcome(
        sequence=1, round=1, accepted=0, bonus=9, verify_ms=1.0, idle_ms=0.0
    )
    house.service(b"d", outcome)
    assert house.told(b"c", Text) == []
    house.verified(0, 5)
    assert [text.tokens for text in house.told(b"c", Text)] == [[5]]


def test_a_client_learns_whether_it_is_served(house: House) -> None:
    """The status tells a client about its own request, running or waiting, and nobody else's."""
    house.client(ask(4))
    house.client(StatusRequest(request=4))
    house.client(StatusRequest(request=5))
    house.client(StatusRequest(request=4), peer=b"other")
    assert [(s.request, s.serving) for s in house.told(b"c", Status)] == [(4, True), (5, False)]
    assert [s.serving for s in house.told(b"other", Status)] == [False]


def test_a_request_that_comes_again_is_answered_once(house: House) -> None:
    """A client that was in doubt may repeat itself while its request is served, or waits."""
    for _ in range(2):
        house.client(ask(1))
        house.client(ask(2))
    house.client(StatusRequest())
    status = house.told(b"c", Status)[-1]
    assert (status.active, status.waiting) == (1, 1)


def test_a_new_request_is_a_new_text(house: House) -> None:
    """While the drafter rests, a request that arrives gives it another trial."""
    pace = house._orchestrator._estimates.switch("ssd")
    assert pace is not None
    while pace.speculating:
        pace.observe(1, 2e3, 100.0, speculating=True)
    house.client(ask(1))
    assert pace.speculating


def test_progress_of_a_prompt_is_passed_on(house: House) -> None:
    """To the client that asked for it, and into the status; a drafter has no say in it."""
    house.client(ask(progress=True))
    [opened] = house.told(b"v", OpenSequence)
    house.service(b"d", PrefillProgress(sequence=opened.sequence, length=1))
    assert house.told(b"c", Progress) == []
    house.service(b"v", PrefillProgress(sequence=opened.sequence, length=2, cached=1))
    progress = Progress(request=1, prompt_tokens=3, computed=2, cached=1)
    assert house.told(b"c", Progress) == [progress]
    house.client(StatusRequest())
    [status] = house.told(b"c", Status)[-1].sequences
    assert (status.state, status.computed_tokens, status.cached_tokens) == ("prefill", 2, 1)


def test_progress_is_for_those_who_asked(house: House) -> None:
    """Others do not hear of it, as a program that does not know the message."""
    house.client(ask())
    [opened] = house.told(b"v", OpenSequence)
    house.service(b"v", PrefillProgress(sequence=opened.sequence, length=2))
    assert house.told(b"c", Progress) == []


def test_what_nobody_reads_is_counted(house: House) -> None:
    """The status says how many messages were dropped because their reader was gone."""
    house.client(ask(1), peer=b"gone")
    house.clients.gone.add(b"gone")
    house.verified(0, 5)
    house.client(StatusRequest())
    assert house.told(b"c", Status)[-1].dropped == house.clients.dropped > 0


def test_signs_of_life_are_answered(house: House) -> None:
    """A known service hears its beat again; a stranger is asked who it is."""
    house.service(b"d", Heartbeat(7))
    house.service(b"x", Heartbeat(0))
    assert [Heartbeat(7)] == house.told(b"d", Heartbeat)
    assert [Identify()] == house.told(b"x", Identify)


def test_a_service_may_introduce_itself_again(house: House) -> None:
    """A second Hello over the same connection is welcome and stops nobody."""
    house.client(ask())
    house.service(b"d", DRAFTER)
    assert house.told(b"d", Stop) == []
    assert len(house.told(b"d", Welcome)) == 2
    assert len(house.told(b"d", OpenSequence)) == 2


def test_a_stranger_is_asked_who_it_is(house: House) -> None:
    """Whatever a service says to an orchestrator that was restarted, it is asked at once."""
    tree = DraftTree(
        sequence=1, round=1, depth=1, outcomes=[], tokens=[], confidences=[], draft_ms=1.0
    )
    house.service(b"x", tree)
    assert [Identify()] == house.told(b"x", Identify)


def test_who_is_condemned_does_not_come_back(house: House) -> None:
    """A process that is about to be ended is not adopted again."""
    house.services.inbox.append((b"d", Rejected("no message of a service")))
    house.service(b"d", DRAFTER)
    house.client(StatusRequest())
    assert [s.role for s in house.told(b"c", Status)[-1].services] == ["verifier"]


def test_the_condemned_do_not_pile_up(house: House) -> None:
    """Processes that the supervisor does not know, and never ends, are forgotten some time."""
    for pid in range(100, 200):
        house.service(b"x", msgspec.structs.replace(DRAFTER, pid=pid))
        house.services.inbox.append((b"x", Rejected("no message of a service")))
        house.client(StatusRequest())
    assert list(house.told(b"c", Status)[-1].marked_for_kill) == list(range(168, 200))


def test_an_answer_with_a_gap_has_no_end(house: House) -> None:
    """A client that missed a part hears no Finished, which would hide it; it asks again."""
    house.client(ask(max_tokens=3, mode="ar"))
    house.clients.gone.add(b"c")
    house.verified(0, 5)
    house.clients.gone.clear()
    house.client(StatusRequest(request=1, question=1))
    assert house.told(b"c", Finished) == []
    assert not house.told(b"c", Status)[-1].serving


def test_a_drafter_that_sends_invalid_messages_is_left(house: House) -> None:
    """What cannot be decoded marks its sender, and the request goes on plainly at once."""
    house.client(ask(max_tokens=3, mode="sd"))
    house.service(b"d", Prefilled(sequence=1, length=2, prefill_ms=1.0))
    house.verified(0, 5)
    house.drafting(float("nan"))
    house.verified(0, 6)
    house.verified(0, 7)
    assert [finished.reason for finished in house.told(b"c", Finished)] == ["length"]
    house.client(StatusRequest())
    status = house.told(b"c", Status)[-1]
    assert list(status.marked_for_kill) == [12]
    assert "invalid message" in status.marked_for_kill[12]
    assert [service.role for service in status.services] == ["verifier"]
    assert status.degraded == ["there is no drafter at the moment: the target decodes plainly"]


def test_condemned_until_it_is_dead(house: House) -> None:
    """The supervisor's news of its end clears a process's name, which may be given again."""
    house.service(b"v", Heartbeat(0))
    house.services.inbox.append((b"v", Rejected("no message of a service")))
    house.client(StatusRequest())
    assert list(house.told(b"c", Status)[-1].marked_for_kill) == [11]
    house.client(ServiceDown(role="verifier", pid=11, reason="killed", final=False))
    house.client(StatusRequest())
    assert house.told(b"c", Status)[-1].marked_for_kill == {}


READS = FeatureRequest(layers=[1, 2])
READER = msgspec.structs.replace(DRAFTER, pid=13, features=READS)
STATES = Features(sequence=1, first=0, count=2, data=b"abcd", request=1)


def test_what_a_drafter_reads_is_asked_for_whoever_comes_last() -> None:
    """The verifier is asked once both are there, and again after a restart; a swap ends it."""
    house = House()
    house.service(b"d", READER)
    house.service(b"v", VERIFIER)
    assert house.told(b"v", ReadTarget) == [ReadTarget(features=READS, number=1)]
    house.service(b"w", msgspec.structs.replace(VERIFIER, pid=14))
    assert house.told(b"w", ReadTarget) == [ReadTarget(features=READS, number=2)]
    house.service(b"e", msgspec.structs.replace(READER, pid=15))
    house.service(b"f", msgspec.structs.replace(DRAFTER, pid=16))
    house.service(b"g", msgspec.structs.replace(DRAFTER, pid=17))
    expected = [READS, READS, None]
    assert [request.features for request in house.told(b"w", ReadTarget)] == expected


def test_a_drafter_that_reads_nothing_costs_nothing(house: House) -> None:
    """No message more than without the feature, and stray states go no further."""
    house.service(b"v", STATES)
    assert house.told(b"v", ReadTarget) == []
    assert house.told(b"d", Features) == []


def test_states_go_to_the_drafter_as_they_came() -> None:
    """Before the round that follows; from a drafter they are an invalid message."""
    house = House()
    house.service(b"v", VERIFIER)
    house.service(b"d", READER)
    house.service(b"v", STATES)
    assert house.told(b"d", Features) == [STATES]
    house.service(b"v", msgspec.structs.replace(STATES, request=0))
    assert house.told(b"d", Features) == [STATES]  # the other was not asked for by this one
    house.service(b"d", STATES)
    house.client(StatusRequest())
    assert 13 in house.told(b"c", Status)[-1].marked_for_kill
    assert house.told(b"d", Features) == [STATES]


def test_a_target_that_cannot_be_read_is_said() -> None:
    """The status has the verifier's reason until another drafter comes."""
    house = House()
    house.service(b"v", VERIFIER)
    house.service(b"d", READER)
    house.service(b"v", Failed(sequence=0, error="no such layers"))
    house.client(StatusRequest())
    assert "no such layers" in " ".join(house.told(b"c", Status)[-1].degraded)
    house.service(b"e", msgspec.structs.replace(DRAFTER, pid=16))
    house.client(StatusRequest())
    assert house.told(b"c", Status)[-1].degraded == []


def test_nothing_follows_the_end_of_a_request_that_failed(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What goes wrong while the next round is decided is its end: no text comes after it."""
    house.client(ask(max_tokens=9))

    def fail(*_: object, **__: object) -> None:
        raise ValueError("of the plan")

    monkeypatch.setattr("orchestrator.sequence.sequence.Sequence._next_round", fail)
    house.verified(0, 5)
    (finished,) = house.told(b"c", Finished)
    assert (finished.reason, "of the plan" in finished.error) == ("error", True)
    assert house.clients.sent[-1] == (b"c", finished)
