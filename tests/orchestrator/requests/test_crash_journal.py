"""What a new orchestrator learns of the death of the one before, from a real file."""

from pathlib import Path

import pytest

from orchestrator.requests.crash_journal import CrashJournal, fingerprint
from protocol.messages import Generate, Sampling

POISON = Generate(request=3, text="poison", sampling=Sampling(seed=5))
DIGEST = fingerprint(POISON)


def die(folder: Path, length: int, message: Generate = POISON) -> None:
    """A process that ends while it works on a request: nothing is closed or left."""
    CrashJournal(folder, 2).enter(fingerprint(message), length)


def test_the_same_request_has_the_same_name() -> None:
    """Whoever asks, and under whatever number; another text has another one."""
    assert fingerprint(Generate(request=9, text="poison", sampling=Sampling(seed=5))) == DIGEST
    assert fingerprint(Generate(request=3, text="other", sampling=Sampling(seed=5))) != DIGEST


def test_two_deaths_at_one_place_are_enough(tmp_path: Path) -> None:
    """After the first the request is tried again, after the second it is not."""
    die(tmp_path, 40)
    assert not CrashJournal(tmp_path, 2).is_guilty(DIGEST)
    die(tmp_path, 43)
    journal = CrashJournal(tmp_path, 2)
    assert journal.is_guilty(DIGEST)
    assert not journal.is_guilty(fingerprint(Generate(request=1, text="other")))
    assert CrashJournal(tmp_path, 2).is_guilty(DIGEST)  # that it ended well changes nothing


def test_deaths_at_different_places_are_not_its_doing(tmp_path: Path) -> None:
    """Somebody kills the process now and then: what it did at the moment is not to blame."""
    for length in (10, 100, 200, 300):
        die(tmp_path, length)
        assert not CrashJournal(tmp_path, 2).is_guilty(DIGEST)


def test_an_idle_process_blames_nobody(tmp_path: Path) -> None:
    """Who is left again is not at hand; work inside other work returns to the outer one."""
    journal = CrashJournal(tmp_path, 1)
    outer = journal.enter(DIGEST, 5)
    inner = journal.enter(bytes(range(16)), 7)
    journal.leave(inner)
    assert (tmp_path / "at_work").read_bytes()[:16] == DIGEST
    journal.leave(outer)
    assert not CrashJournal(tmp_path, 1).is_guilty(DIGEST)


@pytest.mark.parametrize("content", [b"", b"nonsense", b'{"x": 3}', b"\xff" * 99])
def test_a_broken_file_is_ignored(tmp_path: Path, content: bytes) -> None:
    """It costs what was remembered, never the start."""
    (tmp_path / "deaths.json").write_bytes(content)
    (tmp_path / "at_work").write_bytes(content)
    journal = CrashJournal(tmp_path, 2)
    journal.leave(journal.enter(DIGEST, 1))
    assert not journal.is_guilty(DIGEST)


def test_without_a_folder_nothing_is_remembered(tmp_path: Path) -> None:
    """As in a test, or where the run folder has gone."""
    for folder in (None, tmp_path / "gone"):
        journal = CrashJournal(folder, 2)
        journal.leave(journal.enter(DIGEST, 1))
        assert not journal.is_guilty(DIGEST)
