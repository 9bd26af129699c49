"""Under a limit on memory, a prompt that does not fit is refused, and nobody else notices."""

import contextlib
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from launch.settings.settings import StackSettings
from protocol.errors import RuntimeFailure
from tests.support.stack import RunningStack, running
from tests.support.tiny_models import write_tiny_model

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(sys.platform != "linux", reason="other systems limit no address space"),
]

MB = 1 << 20
WORDS = "sea and river " * 2000
LARGE_KV = {
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 64,
    "max_position_embeddings": 1 << 20,
}
"""Some 50 kB a token and layer."""
CGROUPS = Path("/sys/fs/cgroup/memory")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("models")
    target = write_tiny_model(folder / "target", "llama", layers=6, config=LARGE_KV)
    return str(target), str(write_tiny_model(folder / "draft", "llama"))


@pytest.fixture(scope="module")
def stack(pair: tuple[str, str]) -> Iterator[RunningStack]:
    settings = StackSettings(model=pair[0], draft_model=pair[1], kv_bytes=1 << 40, restarts=5)
    with running(settings) as started:
        yield started


def test_a_prompt_beyond_the_address_space_ends_alone(stack: RunningStack) -> None:
    """Six thousand words: before this was reckoned, the verifier ended with signal 11."""
    before = stack.answer("hello").tokens
    verifier = stack.pid("verifier")
    limit = psutil.Process(verifier).memory_info().vms + 300 * MB
    resource.prlimit(verifier, resource.RLIMIT_AS, (limit, limit))
    for _ in range(2):
        with pytest.raises(RuntimeFailure, match=r"tokens needs .* MB of memory, and .*ulimit -v"):
            stack.answer(WORDS)
        assert stack.answer("hello").tokens == before
    assert stack.pid("verifier") == verifier


def test_a_prompt_beyond_a_control_group_ends_alone(pair: tuple[str, str]) -> None:
    """As in a container: the kernel would have ended the process."""
    settings = StackSettings(model=pair[0], draft_model=pair[1], kv_bytes=1 << 40, restarts=5)
    with control_group() as group, running(settings) as stack:
        before = stack.answer("hello").tokens
        verifier = stack.pid("verifier")
        (group / "cgroup.procs").write_text(str(verifier), encoding="ascii")
        # What it took before it came is charged to where it was.
        (group / "memory.limit_in_bytes").write_text(str(300 * MB), encoding="ascii")
        with pytest.raises(RuntimeFailure, match=r"tokens needs .* MB of memory, and .*group"):
            stack.answer(WORDS)
        assert stack.answer("hello").tokens == before
        assert stack.pid("verifier") == verifier


@contextlib.contextmanager
def control_group() -> Iterator[Path]:
    """A memory group of our own; skips the test where none can be made."""
    group = CGROUPS / f"ssd-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError:
        pytest.skip("control groups of version 1 cannot be made here")
    try:
        yield group
    finally:
        group.rmdir()


def test_a_stack_that_starts_under_a_limit_says_what_fits(pair: tuple[str, str]) -> None:
    """The prompt is refused before any work, with its size, the most, and the limit's name."""
    limit = 4096 * MB

    def confine() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    models = ("--model", pair[0], "--draft-model", pair[1])
    done = subprocess.run(
        [sys.executable, "-m", "launch.cli", "generate", *models, "--prompt", WORDS * 3],
        preexec_fn=confine,  # no threads run here
        capture_output=True,
        check=False,
        timeout=300,
        text=True,
    )
    assert done.returncode == 2, done.stderr
    assert "more than there is memory for" in done.stderr
    assert "address space (ulimit -v)" in done.stderr
