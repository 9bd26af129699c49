"""Followers as processes: nothing is left of them, whatever happens to rank 0."""

import os
import signal
import subprocess
import sys

import psutil
import pytest

from protocol.settings import RankHost
from services.ranks.process import command_for
from tests.support.stack import eventually, gone

pytestmark = pytest.mark.processes

_RANK_0 = """
import os, time
from protocol.settings import RankHost
from services.ranks.process import RankProcess
follower = RankProcess(1, RankHost(), "")
os.write(1, str(follower._process.pid).encode())
time.sleep(600)
"""


def test_another_machine_is_asked_over_ssh_without_questions() -> None:
    """The command is one word for the remote shell; its Python is the one that was named."""
    studio = RankHost(name="studio", is_local=False)
    *ssh, host, command = command_for(studio, "/opt/my python/bin/python")
    assert ssh == ["ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10"]
    assert host == "studio"
    assert command == "'/opt/my python/bin/python' -P -m services.ranks.main"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux kills a process with its parent")
def test_a_stopped_follower_ends_with_rank_0() -> None:
    """SIGKILL to rank 0 while its follower is stopped, and so cannot see the end of its input."""
    rank0 = subprocess.Popen([sys.executable, "-c", _RANK_0], stdout=subprocess.PIPE)
    assert rank0.stdout is not None
    pid = int(os.read(rank0.stdout.fileno(), 20))
    try:
        eventually(lambda: _title(pid).startswith("ssd rank"), "the follower has begun")
        os.kill(pid, signal.SIGSTOP)
    finally:
        rank0.kill()
        rank0.wait()
        rank0.stdout.close()
    eventually(lambda: gone([pid]), "the follower is gone")


def _title(pid: int) -> str:
    return " ".join(psutil.Process(pid).cmdline())
