"""Whether the drafter has nothing to do: who says so, and who sees it."""

import logging
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from protocol.messages import CloseSequence, Message, ToService
from protocol.settings import DrafterSettings
from services.drafter import main
from services.runtime.idle_flag import IdleFlag, open_idle_flag
from services.runtime.inbox import Inbox
from services.verifier.verifier import SpareCores
from tests.services.drafter.lookup_backend import LookupBackend


def test_what_one_says_the_other_sees(tmp_path: Path) -> None:
    """In a private file that whoever is first makes, and that later ones leave as it is."""
    path = tmp_path / "idle"
    drafter = IdleFlag(str(path))
    assert not drafter.is_idle
    drafter.is_idle = True
    verifier = IdleFlag(str(path))
    assert verifier.is_idle
    assert verifier.word.value == 1
    verifier.is_idle = False
    assert not drafter.is_idle
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_it_outlives_another_process_that_had_it(tmp_path: Path) -> None:
    """A killed one leaves it as it was, and a new one is not misled."""
    path = str(tmp_path / "idle")
    code = "import sys; from services.runtime.idle_flag import IdleFlag as F; import os"
    end = "F(sys.argv[1]).is_idle = True; os.kill(os.getpid(), 9)"
    killed = subprocess.run([sys.executable, "-c", f"{code}; {end}", path], check=False)
    assert killed.returncode == -9
    assert IdleFlag(path).is_idle


@pytest.mark.parametrize("place", ["missing/idle", "link", "folder"])
def test_without_a_file_no_core_is_lent(
    tmp_path: Path, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Once it is said why, and links lead nowhere."""
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "folder").mkdir()
    with caplog.at_level(logging.INFO):
        assert open_idle_flag(str(tmp_path / place)) is None
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert not (tmp_path / "elsewhere").exists()
    assert open_idle_flag("") is None
    assert len(caplog.records) == 1


class Line:
    """A connection that notes what the flag says while a service waits for news."""

    def __init__(self, flag: IdleFlag, messages: list[ToService]) -> None:
        self._flag, self._messages = flag, messages
        self.seen: list[bool] = []

    def ready(self, timeout_s: float) -> bool:
        del timeout_s
        return bool(self._messages)

    def await_news(self, timeout_s: float) -> bool:
        self.seen.append(self._flag.is_idle)
        return self.ready(timeout_s)

    def receive(self, timeout_s: float, what: str) -> ToService:
        del timeout_s, what
        assert not self._flag.is_idle
        return self._messages.pop(0)

    def send(self, message: Message) -> None:
        del message


def test_a_drafter_is_idle_while_it_waits_for_news(tmp_path: Path) -> None:
    """Not when it starts, not while it reads, works, or looks for news between two steps."""
    flag = IdleFlag(str(tmp_path / "idle"))
    flag.is_idle = True
    line = Line(flag, [])
    inbox = Inbox(line, flag)
    assert not flag.is_idle
    inbox.wait()
    line._messages += [CloseSequence(sequence=1), CloseSequence(sequence=2)]
    inbox.wait()
    assert len(inbox.messages) == 2
    assert not flag.is_idle
    inbox.look(1)
    assert not flag.is_idle
    assert line.seen == [True, True]


def test_a_pass_begins_with_the_drafter_at_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its cores are lent once it has done what it is asked for beside this pass, not before."""
    used: list[tuple[object, ...]] = []
    monkeypatch.setattr("services.verifier.verifier.use_spare_cores", lambda *a: used.append(a))
    flag = IdleFlag(str(tmp_path / "idle"))
    cores = SpareCores([7], flag)
    flag.is_idle = True
    cores.begin_pass(drafter_idle=False)
    assert not flag.is_idle
    flag.is_idle = True
    cores.begin_pass(drafter_idle=True)
    assert flag.is_idle
    SpareCores([7]).begin_pass(drafter_idle=False)
    assert used == [((7,), flag.word), ((7,),), ((),)]


def test_a_drafter_uses_the_targets_cores_while_that_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the flag of the verifier, and with no flag not at all."""
    used: list[Any] = []
    monkeypatch.setattr(main, "use_spare_cores", lambda *given: used.append(given))
    monkeypatch.setattr(main, "serve", lambda *_: None)
    for flag in ("", str(tmp_path / "verifier-idle")):
        settings = DrafterSettings(
            lifeline=0, address=f"ipc://{tmp_path}/services", backend="ngram", spare_cores=[3],
            spare_flag=flag,
        )  # fmt: skip
        main._serve(settings, LookupBackend())
    [(cores, word)] = used
    assert cores == [3]
    IdleFlag(str(tmp_path / "verifier-idle")).is_idle = True
    assert word.value == 1
