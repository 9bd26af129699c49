"""Files that appear whole or not at all, whoever else may write to their folder."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from protocol.process import files
from protocol.process.files import (
    PUBLIC,
    atomic_folder,
    atomic_writer,
    remove_leftovers,
    remove_temporaries,
    write_atomically,
)


def dead_pid() -> int:
    """The id of a process that is gone."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    """The new content is there, for its owner alone, and nothing else is left."""
    path = tmp_path / "kept"
    path.write_text("old")
    write_atomically(path, "new", sync=True)
    assert path.read_text() == "new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_what_others_may_read_follows_the_umask(tmp_path: Path) -> None:
    """A report is as readable as any other file that the user creates."""
    path, plain = tmp_path / "report", tmp_path / "plain"
    write_atomically(path, b"{}", mode=PUBLIC)
    plain.write_bytes(b"{}")
    assert path.stat().st_mode == plain.stat().st_mode


def test_a_failure_leaves_the_old_file(tmp_path: Path) -> None:
    """Whatever goes wrong in the middle, the destination is as it was."""
    path = tmp_path / "kept"
    path.write_text("old")

    def write_half() -> None:
        with atomic_writer(path) as file:
            file.write(b"half of the ne")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_half()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_in_the_way_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody who guessed the temporary name and laid a link there stops the writing only."""
    victim, path = tmp_path / "victim", tmp_path / "kept"
    victim.write_text("mine")
    monkeypatch.setattr(files.secrets, "token_hex", lambda count: "0" * count)
    (tmp_path / f".kept.{os.getpid()}.{'0' * 8}.tmp").symlink_to(victim)
    with pytest.raises(FileExistsError):
        write_atomically(path, "new")
    with pytest.raises(FileExistsError), atomic_folder(path):
        pass
    assert victim.read_text() == "mine"
    assert not path.exists()


def test_a_link_at_the_destination_is_replaced(tmp_path: Path) -> None:
    """What it points to keeps its content."""
    victim, path = tmp_path / "victim", tmp_path / "kept"
    victim.write_text("mine")
    path.symlink_to(victim)
    write_atomically(path, "new")
    assert (victim.read_text(), path.read_text()) == ("mine", "new")
    assert not path.is_symlink()


def test_a_folder_is_replaced_as_a_whole(tmp_path: Path) -> None:
    """It is filled where only its owner may look, under a name that cannot be foreseen."""
    path, contents = tmp_path / "out", set()
    for content in ("old", "new"):
        with atomic_folder(path) as folder:
            folder.mkdir()
            (folder / "file").write_text(content)
            assert stat.S_IMODE(folder.parent.stat().st_mode) == 0o700
            contents.add(folder.parent.name)
    assert (path / "file").read_text() == "new"
    assert len(contents) == 2
    assert list(tmp_path.iterdir()) == [path]


def test_a_failure_leaves_the_old_folder(tmp_path: Path) -> None:
    """Whatever goes wrong in the middle, what was there still is."""
    path = tmp_path / "out"
    path.mkdir()

    def make_half() -> None:
        with atomic_folder(path) as folder:
            folder.mkdir()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_half()
    assert list(tmp_path.iterdir()) == [path]


def test_leftovers_of_the_dead_are_removed(tmp_path: Path) -> None:
    """What a living process writes stays; a link is removed without what it points to."""
    gone = dead_pid()
    (tmp_path / f".kept.{gone}.aa.tmp").write_text("half")
    (tmp_path / f".other.{gone}.aa.tmp").mkdir()
    (tmp_path / f".other.{gone}.aa.tmp" / "part").write_text("half")
    target = tmp_path / "folder"
    target.mkdir()
    (target / "precious").write_text("mine")
    (tmp_path / f".link.{gone}.aa.tmp").symlink_to(target)
    living = tmp_path / f".kept.{os.getpid()}.bb.tmp"
    living.write_text("half")
    remove_leftovers(tmp_path, "kept")
    assert len(list(tmp_path.iterdir())) == 4
    remove_leftovers(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([living, target])
    assert (target / "precious").read_text() == "mine"
    remove_temporaries(tmp_path / "kept")
    assert list(tmp_path.iterdir()) == [target]
    remove_leftovers(tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["x" * 200, "ä" * 100, "a[b]*", ".hidden"])
def test_any_name_will_do(tmp_path: Path, name: str) -> None:
    """Long names, wide characters, and those that mean something to a pattern."""
    write_atomically(tmp_path / name, "new")
    half = files._temporary_path(tmp_path / name)
    half.touch()
    remove_temporaries(tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == [name]
