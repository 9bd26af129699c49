"""A target spread over ranks: the tokens of plain decoding, whatever happens to a rank."""

import json
import os
import signal
import socket
import stat
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from functools import partial
from itertools import takewhile
from pathlib import Path

import msgspec
import psutil
import pytest

from launch.doctor import examine_ranks
from launch.settings.settings import StackSettings
from launch.stack.session import private_stack
from protocol.errors import ModelError, RuntimeFailure, SsdError, UsageError
from protocol.messages import (
    ChatMessage,
    Generate,
    Mode,
    RankStatus,
    Sampling,
    Text,
    Tokens,
)
from tests.support.reference import Reference
from tests.support.stack import (
    Answered,
    PatientClient,
    RunningStack,
    eventually,
    gone,
    running,
)
from tests.support.tiny_models import EOS, write_tiny_model

pytestmark = pytest.mark.processes

PROMPT = "the quick brown fox"
TEXT: Tokens = [0, 2, 97, 41, 250, 33, 8, 141, 77, 19, 203, 64]
TOKENS = 40
FEW = 20
SAMPLINGS = {"T0": Sampling(), "T0.7": Sampling(temperature=0.7, seed=5)}

FAKE_SSH = """#!/bin/sh
while [ "${{1#-}}" != "$1" ]; do if [ "$1" = -o ]; then shift; fi; shift; done
host=$1; shift
case $host in
  nowhere) echo "ssh: connect to host nowhere port 22: No route to host" >&2; exit 255;;
  version|weights|part|hang) case "$*" in
    *services.ranks.main*) exec {python} {odd_rank} "$host" "$0.hang";;
  esac;;
esac
exec /bin/sh -c "$*"
"""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> StackSettings:
    base = tmp_path_factory.mktemp("pair")
    target = write_tiny_model(base / "target", "llama", seed=1)
    write_tiny_model(base / "target-other", "llama", seed=2)
    draft = write_tiny_model(base / "draft", "llama", seed=1, noise=0.1)
    return StackSettings(model=str(target), draft_model=str(draft))


@pytest.fixture(scope="module")
def stack(pair: StackSettings) -> Iterator[RunningStack]:
    settings = msgspec.structs.replace(pair, target_ranks=2, restarts=50, prefill_step_size=16)
    with running(settings) as started:
        yield started


def ranks_of(stack: RunningStack) -> list[RankStatus]:
    """The ranks of the verifier that runs now."""
    services = stack.client.status().services
    return next((service.ranks for service in services if service.role == "verifier"), [])


def pids_of(stack: RunningStack, but: Sequence[int] = ()) -> list[int]:
    """Their processes, once there is a group with none of these."""
    found: list[int] = []

    def is_up() -> bool:
        found[:] = [rank.pid for rank in ranks_of(stack)]
        return bool(found) and not {*found} & {*but}

    eventually(is_up, "the group is up")
    return found


def ask(
    stack: RunningStack,
    sampling: str,
    mode: Mode = "ssd",
    prompt: str | Tokens = PROMPT,
    max_tokens: int = TOKENS,
) -> Answered:
    return stack.answer(
        prompt if isinstance(prompt, str) else "",
        tokens=None if isinstance(prompt, str) else prompt,
        mode=mode,
        sampling=SAMPLINGS[sampling],
        max_tokens=max_tokens,
        num_draft_tokens=0 if mode == "ar" else 3,
    )


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_every_mode_has_the_tokens_of_plain_decoding(stack: RunningStack, sampling: str) -> None:
    """ar, sd and ssd agree within one sharding, and drafts were verified and accepted."""
    plain = ask(stack, sampling, "ar")
    modes: tuple[Mode, ...] = ("sd", "ssd")
    for mode in modes:
        answer = stack.until(
            lambda answer: answer.statistics.accepted > 0,
            "drafts come in time",
            partial(ask, stack, sampling, mode),
        )
        assert answer.tokens == plain.tokens


def test_requests_together_get_what_each_gets_alone(stack: RunningStack) -> None:
    """Several sequences in one pass, with long prompts in pieces, on both ranks."""
    prompts = [f"{PROMPT} {'again and ' * (5 * number)}" for number in range(4)]
    alone = [ask(stack, "T0.7", "ar", prompt).tokens for prompt in prompts]
    together: dict[int, Tokens] = {}

    def one(number: int) -> None:
        with closing(PatientClient(stack.supervisor.run_dir.clients_address)) as client:
            own = RunningStack(stack.supervisor, client, stack.lines)
            together[number] = ask(own, "T0.7", "ssd", prompts[number]).tokens

    threads = [threading.Thread(target=one, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [together[number] for number in range(4)] == alone


def test_followers_keep_the_prefix_cache_too(stack: RunningStack) -> None:
    """A prompt that continues an earlier one takes its KV on all ranks."""
    first = [0, 2, 97, 41, 250, 33, 8, 141, 77, 19, 203, 64] * 3
    opening = stack.answer("", tokens=first, max_tokens=8).tokens
    longer = [*first, *opening, 5, 6, 7]
    answer = stack.answer("", tokens=longer, max_tokens=TOKENS)
    other = stack.answer("", tokens=[9, *longer[1:]], max_tokens=1)
    assert answer.cached_tokens > len(first)
    assert other.cached_tokens == 0
    assert stack.answer("", tokens=longer, max_tokens=TOKENS, mode="ar").tokens == answer.tokens


def test_a_cancelled_request_leaves_the_ranks_in_step(stack: RunningStack) -> None:
    """After a cancel in the middle of an answer the next one has the right tokens."""
    plain = ask(stack, "T0", "ar").tokens
    before = pids_of(stack)
    request = Generate(
        request=stack.client.number(), messages=[ChatMessage("user", PROMPT)], max_tokens=400
    )
    with closing(stack.client.generate(request)) as stream:  # the end of it cancels
        assert isinstance(next(stream), Text)
    assert ask(stack, "T0").tokens == plain
    assert pids_of(stack) == before


# ------------------------------------------------------------ other machines


@pytest.fixture
def fake_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An `ssh` that runs the command here, or fails in the way that the host's name says."""
    odd_rank = Path(__file__).parents[2] / "support" / "odd_rank.py"
    script = tmp_path / "bin" / "ssh"
    script.parent.mkdir()
    script.write_text(FAKE_SSH.format(python=sys.executable, odd_rank=odd_rank))
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{script.parent}{os.pathsep}{os.environ['PATH']}")


def over(pair: StackSettings, folder: Path, *names: str) -> StackSettings:
    """The pair with its target over this machine and these."""
    hosts = [{"ssh": name, "ips": ["127.0.0.1"]} for name in ("127.0.0.1", *names)]
    file = folder / "hosts.json"
    file.write_text(json.dumps(hosts))
    return msgspec.structs.replace(pair, hosts=str(file), rank_port=two_free_ports(), restarts=50)


def two_free_ports() -> int:
    """The first of two in a row, below those that the system gives to others meanwhile."""
    for first in range(20_000 + os.getpid() % 1000, 32_000, 2):
        with socket.socket() as one, socket.socket() as two, suppress(OSError):
            one.bind(("127.0.0.1", first))
            two.bind(("127.0.0.1", first + 1))
            return first
    raise AssertionError("no two ports are free")


@pytest.mark.usefixtures("fake_ssh", "run_dir")
def test_a_rank_on_another_machine(pair: StackSettings, tmp_path: Path) -> None:
    """ssh carries the messages; a remote rank that is stopped is ended, and replaced."""
    with running(over(pair, tmp_path, "studio")) as stack:
        old = pids_of(stack)
        assert [rank.host for rank in ranks_of(stack)] == ["127.0.0.1", "studio"]
        plain = ask(stack, "T0", "ar").tokens
        assert ask(stack, "T0", "ssd").tokens == plain
        os.kill(old[1], signal.SIGSTOP)
        assert ask(stack, "T0", "ssd").tokens == plain
        eventually(lambda: gone(old), "the old ranks are gone")
        new = pids_of(stack, but=old)
    eventually(lambda: gone(new), "all ranks are gone")


@pytest.mark.usefixtures("fake_ssh", "run_dir")
def test_a_rank_that_hangs_but_beats(pair: StackSettings, tmp_path: Path) -> None:
    """Rank 0 waits for it in an exchange; then its own heartbeats are missed, and both replaced."""
    settings = msgspec.structs.replace(over(pair, tmp_path, "hang"), hang_timeout_s=3.0)
    with running(settings) as stack:
        old = pids_of(stack)
        (tmp_path / "bin" / "ssh.hang").touch()
        answer = ask(stack, "T0", "ssd")
        assert not (tmp_path / "bin" / "ssh.hang").exists()
        assert answer.statistics.verifier_restarts
        assert answer.tokens == ask(stack, "T0", "ar").tokens
        eventually(lambda: gone(old), "the old ranks are gone")


@pytest.mark.usefixtures("fake_ssh", "run_dir")
@pytest.mark.parametrize(
    ("host", "error", "words"),
    [
        ("nowhere", RuntimeFailure, "rank 1 on nowhere ended with exit code 255: ssh: connect"),
        ("version", ModelError, "rank 1 on version has another version of MLX: 0.0.1"),
        ("weights", ModelError, "rank 1 on weights has another model"),
        ("part", ModelError, "rank 1 ends in other logits than rank 0"),
    ],
)
def test_a_host_that_cannot_take_part_is_named(
    pair: StackSettings, tmp_path: Path, host: str, error: type[SsdError], words: str
) -> None:
    """Before the first token: a missing host, other versions, other weights, another part."""
    with (
        pytest.raises(error, match=words),
        private_stack(over(pair, tmp_path, host), lambda status: None),
    ):
        pass
    eventually(lambda: not started_by(tmp_path), "no rank is left")


def started_by(folder: Path) -> list[str]:
    """The processes that know the `ssh` of this folder."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            own = process.pid == os.getpid()  # it has the variable for its children
            if not own and str(folder) in process.environ().get("PATH", ""):
                found.append(process.name())
    return found


@pytest.mark.usefixtures("fake_ssh")
def test_doctor_measures_the_links_and_names_who_cannot_take_part(
    pair: StackSettings, tmp_path: Path
) -> None:
    """One line per link, or the host and what is wrong with it."""
    found = examine_ranks(over(pair, tmp_path, "studio"))
    assert [finding.text.partition(":")[0] for finding in found[1:]] == [
        "layers of rank 0",
        "127.0.0.1",
        "from 127.0.0.1 to studio",
        "studio",
        "from studio to 127.0.0.1",
    ]
    assert {finding.level for finding in found} == {"ok"}
    [finding] = examine_ranks(over(pair, tmp_path, "weights"))
    assert (finding.level, finding.text.partition(":")[0]) == (
        "problem",
        "rank 1 on weights has another model (digest of its files)",
    )


@pytest.mark.usefixtures("run_dir")
@pytest.mark.parametrize(
    ("family", "ranks", "split"),
    [("qwen2", 2, "1,2"), ("qwen2", 2, "auto"), ("moe", 2, ""), ("llama", 3, "")],
)
def test_other_shardings_have_the_tokens_of_plain_decoding(
    family: str, ranks: int, split: str, tmp_path: Path
) -> None:
    """Layers by rank, experts by rank, three ranks: all modes agree, and with mlx-lm."""
    heads = {"num_attention_heads": 6, "num_key_value_heads": 3} if ranks == 3 else None
    target = write_tiny_model(tmp_path / "target", family, seed=1, config=heads)
    decoded = Reference(target).decoded(TEXT, FEW, Sampling())
    whole = list(takewhile(lambda token: token != EOS, decoded))
    settings = StackSettings(
        model=str(target), draft_backend="ngram", target_ranks=ranks, split=split
    )
    with running(settings) as stack:
        answers, drawn = (
            [ask(stack, law, mode, TEXT, FEW).tokens for mode in ("ar", "sd", "ssd")]
            for law in SAMPLINGS
        )
    assert answers == [whole] * 3
    assert drawn == [drawn[0]] * 3


def test_doctor_says_whether_the_model_can_be_divided(pair: StackSettings, tmp_path: Path) -> None:
    """Before anything is loaded, and which layers each rank of a pipeline should have."""
    three = examine_ranks(msgspec.structs.replace(pair, target_ranks=3))
    assert [f.text for f in three if f.level == "problem"] == [
        "2 attention heads cannot be divided by 3 ranks; "
        "take a number of ranks that divides the heads and the KV heads, or --split"
    ]
    stages = str(write_tiny_model(tmp_path / "target", "qwen2", seed=1))
    found = examine_ranks(StackSettings(model=stages, draft_backend="ngram", target_ranks=2))
    [proposal] = [f.text for f in found if f.level == "note"]
    assert proposal.partition(" suits")[0] in {"--split 1,2", "--split 2,1"}


@pytest.mark.usefixtures("run_dir")
@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"target_ranks": 3}, ModelError, "attention heads cannot be divided by 3 ranks"),
        ({"target_ranks": 2, "split": "1,2"}, ModelError, "cannot pipeline"),
        ({"target_ranks": 2, "split": "1"}, UsageError, "1 numbers for 2 ranks"),
        ({"split": "1,2"}, UsageError, "need --target-ranks"),
        ({"target_ranks": 2, "prompt_cache_file": "x"}, UsageError, "--prompt-cache-file"),
    ],
)
def test_what_cannot_be_divided_is_refused(
    pair: StackSettings, change: dict[str, object], error: type[SsdError], words: str
) -> None:
    """The error says what does not fit, before anything is computed."""
    with (
        pytest.raises(error, match=words),
        private_stack(msgspec.structs.replace(pair, **change), lambda status: None),
    ):
        pass
