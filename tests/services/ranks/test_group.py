"""Rank 0's side of a group, as far as it goes without MLX."""

import os
import stat
from pathlib import Path

import pytest

from protocol.errors import DeadlineExceeded
from protocol.settings import RankGroupSettings, RankHost, VerifierSettings
from services.ranks.group import RankGroup
from tests.support.stack import eventually, gone

pytestmark = pytest.mark.processes


def test_a_host_that_does_not_answer_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the deadline, with ssh's own words; the ssh that hangs is ended."""
    ssh, noted = tmp_path / "ssh", tmp_path / "pid"
    ssh.write_text(f"#!/bin/sh\necho $$ > {noted}\necho looking for it >&2\nexec sleep 600\n")
    ssh.chmod(ssh.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    group = RankGroupSettings(
        hosts=[
            RankHost(ips=["127.0.0.1"]),
            RankHost(name="studio", is_local=False, ips=["127.0.0.1"]),
        ],
        port=32323,
        start_timeout_s=8.0,
        meet_timeout_s=8.0,
        silence_timeout_s=8.0,
    )
    words = "rank 1 on studio did not answer within 8 s; ssh said: looking for it"
    with pytest.raises(DeadlineExceeded, match=words):
        RankGroup(VerifierSettings(lifeline=0, address=""), group)
    eventually(lambda: gone([int(noted.read_text())]), "the ssh that hung is gone")
