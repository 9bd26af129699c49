"""What is said while the first processes of a stack, or a new one, are waited for."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from launch.models.pair import Pair
from launch.settings.settings import StackSettings
from launch.stack import readiness
from launch.stack.child import Child
from launch.stack.orchestrator_link import OrchestratorLink
from launch.terminal import console
from protocol.errors import DeadlineExceeded, RuntimeFailure
from protocol.messages import ProcessStatus
from protocol.settings import DrafterSettings
from protocol.transport.address import ipc_address


def test_long_loading_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model that loads for long is named again and again; the wait has an end."""
    monkeypatch.setattr(readiness, "_REPORT_EVERY_S", 0.1)
    said: list[tuple[str, str, str]] = []
    loading: Any = SimpleNamespace(exit_code=None, hint="")
    with pytest.raises(DeadlineExceeded, match="drafter and verifier did not become ready"):
        readiness.await_ready(
            ipc_address(str(tmp_path / "s")),
            {"drafter": loading, "verifier": loading},
            4.0,  # longer than this process itself may be held up
            report=lambda role, state, note: said.append((role, state, note)),
            listener=None,
            optional=frozenset(),
            ended=lambda: False,
        )
    assert [line[:2] for line in said[:2]] == [("drafter", "starting"), ("verifier", "starting")]
    assert said[0][2].startswith("still loading, ")
    for note in ("", said[0][2]):
        status = ProcessStatus(
            role="verifier", pid=7, backend="mlx", model="m", state="starting", note=note,
            restarts=0,
        )  # fmt: skip
        console.report_trouble(status)
    assert capsys.readouterr().err.count("verifier") == 1


def test_a_silent_program_is_said_to_want_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever forgot --draft-lines learns it after the first wait, not after the last."""
    monkeypatch.setattr("subprocess.Popen", lambda *args, **kwargs: None)
    common: dict[str, Any] = {"lifeline": 0, "address": "", "ready_timeout_s": 1.0}
    hints = []
    for lines in (False, True):
        settings = DrafterSettings(backend="stdio", command=["cat"], lines=lines, **common)
        child = Child("drafter", "services.drafter.main", settings, tmp_path / "log")
        hints.append(child.hint)
    assert "--draft-lines" in hints[0]
    assert hints[1] == ""


class Living(Child):
    """A process that goes on, and never says Hello."""

    def __init__(self) -> None:
        """Starts nothing."""

    @property
    def exit_code(self) -> None:
        """None: it runs."""


@pytest.mark.parametrize(
    ("patience_s", "end", "reason"),
    [(1000.0, "now", "the stack ended"), (0.0, "never", "new drafter did not become ready")],
)
def test_a_new_drafter_is_not_waited_for_in_vain(
    tmp_path: Path, patience_s: float, end: str, reason: str
) -> None:
    """A wait that the stack's end cut short is not blamed on its length."""
    with (
        OrchestratorLink(ipc_address(str(tmp_path / "s"))) as link,
        pytest.raises(RuntimeFailure, match=reason),
    ):
        readiness.await_drafter(
            Living(),
            Living(),
            link,
            patience_s,
            meanwhile=lambda: None,
            ended=lambda: end == "now",
        )


def test_large_models_have_longer_to_start(tmp_path: Path) -> None:
    """A minute for each GB of both models' weights, on top of the setting."""
    for name, size in (("target", 2_000_000_000), ("drafter", 500_000_000)):
        (tmp_path / name).mkdir()
        with (tmp_path / name / "model.safetensors").open("wb") as file:
            file.truncate(size)
    pair = Pair(str(tmp_path / "target"), str(tmp_path / "drafter"), "mlx")
    settings = StackSettings(start_timeout_s=10.0)
    assert readiness.allow_loading(settings, pair).start_timeout_s == 10.0 + 120.0 + 30.0
    none = Pair(str(tmp_path / "nothing"), "", "ngram")
    assert readiness.allow_loading(settings, none) == settings
