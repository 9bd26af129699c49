"""What is said while the first processes of a stack are waited for."""

from pathlib import Path

import pytest

from launch import muster, show
from protocol.channel import ipc_address
from protocol.errors import DeadlineExceeded
from protocol.messages import ProcessStatus


def test_long_loading_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model that loads for long is named again and again; the wait has an end."""
    monkeypatch.setattr(muster, "_SAY_EVERY_S", 0.1)
    said: list[tuple[str, str]] = []
    with pytest.raises(DeadlineExceeded, match="drafter and verifier did not become ready"):
        muster.await_ready(
            ipc_address(str(tmp_path / "s")),
            {},
            1.0,
            tell=lambda role, state: said.append((role, state)),
            door=None,
            optional=frozenset(),
        )
    assert [role for role, _ in said[:2]] == ["drafter", "verifier"]
    assert said[0][1].startswith("still loading, ")
    for state in ("starting", said[0][1]):
        status = ProcessStatus(
            role="verifier", pid=7, backend="mlx", model="m", state=state, restarts=0
        )
        show.long_waits(status)
    assert capsys.readouterr().err.count("verifier") == 1
