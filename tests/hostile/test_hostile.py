"""One bad request or drafter hurts nobody else: bystanders' answers stay what they are."""

import contextlib
import http.client
import subprocess
import sys
from collections.abc import Callable, Iterator

import psutil
import pytest

from launch.settings.settings import StackSettings
from tests.hostile.bystanders import Bystanders
from tests.hostile.corpus import CORPUS
from tests.support import hostile_drafter
from tests.support.stack import DEADLINE_S, RunningStack, running
from tests.support.tiny_models import write_tiny_model

pytestmark = pytest.mark.processes

LONGEST_WAIT_S = DEADLINE_S / 2
"""Of a bystander, in the middle of an answer: what hangs is replaced long before that."""
HOSTILE_S = 0.7
Record = Callable[[str, object], None]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    folder = tmp_path_factory.mktemp("models")
    settings = StackSettings(
        model=str(write_tiny_model(folder / "target", "llama", seed=1)),
        draft_model=str(write_tiny_model(folder / "draft", "llama", seed=2)),
        http=True,
        port=0,
        restarts=1000,
    )
    with running(settings) as started:
        yield started


@pytest.fixture(scope="module")
def bystanders(stack: RunningStack) -> Iterator[Bystanders]:
    with Bystanders(stack.supervisor.run_dir.clients_address) as found:
        found.await_answers(4)
        yield found


def post(stack: RunningStack, body: bytes) -> int:
    """The status of the answer to this body, once it is complete; 0 if there is none."""
    assert stack.supervisor.listener is not None
    address = stack.supervisor.listener.url.removeprefix("http://")
    connection = http.client.HTTPConnection(address, timeout=DEADLINE_S)
    with contextlib.closing(connection):
        try:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/v1/chat/completions", body, headers)
            response = connection.getresponse()
            response.read()
        except (OSError, http.client.HTTPException):
            return 0  # it may be cut off in the middle of a body that is too large
        return response.status


@contextlib.contextmanager
def undisturbed(bystanders: Bystanders, what: str, record: Record) -> Iterator[None]:
    """Inside, bystanders get every answer, token by token what it must be, and soon."""
    bystanders.reset()
    yield
    bystanders.await_answers(4)
    tally = bystanders.reset()
    record(f"worst wait beside {what}, s", round(tally.worst_wait_s, 2))
    assert tally.failed == []
    assert tally.changed == []
    assert tally.worst_wait_s < LONGEST_WAIT_S


@pytest.mark.parametrize("kind", CORPUS)
def test_a_hostile_request_hurts_nobody(
    stack: RunningStack,
    bystanders: Bystanders,
    kind: str,
    record_testsuite_property: Record,
) -> None:
    """It gets an answer or a refusal; no process dies of it, and the others notice nothing."""
    before = {role: stack.pid(role) for role in ("verifier", "drafter")}
    orchestrator = stack.client.status().pid
    with undisturbed(bystanders, kind, record_testsuite_property):
        statuses = {name: post(stack, body) for name, body in CORPUS[kind].items()}
    # 503: the machine is too busy to check a grammar in time.
    assert {name: one for name, one in statuses.items() if one >= 500 and one != 503} == {}
    assert {role: stack.pid(role) for role in before} == before
    assert stack.client.status().pid == orchestrator


def test_a_grammar_is_checked_by_one_process(stack: RunningStack) -> None:
    """The orchestrator's; what comes over HTTP is not checked by the gateway, too."""
    # One that nobody asked for before: what is known already needs no process.
    known = CORPUS["schema"]["a range of everything"]
    body = known.replace(b"1e-300", b"-7").replace(b"1e+300", b"977")
    assert body != known
    assert post(stack, body) == 200
    checkers = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # somebody else's, that has just ended
            if "text worker" in " ".join(process.cmdline()):
                checkers.append(process.ppid())
    assert set(checkers) == {stack.client.status().pid}


@pytest.mark.parametrize("kind", hostile_drafter.BY_SOCKET)
def test_a_hostile_drafter_hurts_nobody(
    stack: RunningStack,
    bystanders: Bystanders,
    kind: str,
    record_testsuite_property: Record,
) -> None:
    """It comes, misbehaves and is gone; the answers are the target's, and the stack is whole."""
    verifier, orchestrator = stack.pid("verifier"), stack.client.status().pid
    program = [sys.executable, "-P", hostile_drafter.__file__, kind]
    arguments = [stack.supervisor.run_dir.services_address, "1", str(HOSTILE_S)]
    with undisturbed(bystanders, kind, record_testsuite_property):
        subprocess.run(
            [*program, *arguments], check=False, timeout=DEADLINE_S, stderr=subprocess.DEVNULL
        )
        stack.pid("drafter")  # there is one again
    assert (stack.pid("verifier"), stack.client.status().pid) == (verifier, orchestrator)
