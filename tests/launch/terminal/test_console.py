"""What people see of an answer: the colour of each token says where it came from."""

import io
import sys

import pytest
from rich.console import Console
from rich.table import Table

from launch.terminal.console import LEGEND, STYLES, process_line, stderr, stdout, write_coloured
from protocol.messages import ProcessStatus

CODES = {"green": 32, "yellow": 33, "cyan": 36, "magenta": 35}


@pytest.mark.parametrize(
    ("origin", "colour"), [("hit", "green"), ("miss", "yellow"), ("lookup", "cyan")]
)
def test_a_draft_has_the_colour_of_its_origin(origin: str, colour: str) -> None:
    """Hits are green, drafts that were waited for yellow, what was looked up cyan."""
    assert coloured(origin) == f"\x1b[{CODES[colour]}mword\x1b[0m"
    assert f"{colour} = " in LEGEND


def test_the_targets_own_tokens_are_plain() -> None:
    """They are what there is without any draft; every other origin has a colour of its own."""
    assert coloured("target") == "word"
    assert len({coloured(origin) for origin in STYLES}) == len(STYLES) == 5


def test_a_line_that_nobody_reads_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The supervisor's thread goes on when the reader of its output has gone."""
    written: list[str] = []

    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            written.append(text)
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stderr", Gone())
    process_line(
        ProcessStatus(role="drafter", pid=7, backend="mlx", model="m", state="running", restarts=0)
    )
    assert "drafter" in "".join(written)


@pytest.mark.parametrize("columns", ["", "40"])
def test_a_table_in_a_pipe_is_whole(
    columns: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line per row, with every word of it, however narrow the terminal is said to be."""
    monkeypatch.setenv("COLUMNS", columns)
    table = Table(box=None)
    for name in ("model", "path"):
        table.add_column(name)
    rows = [("m" * 30, "p/" * 200), ("a name of several words " * 4, "short")]
    for row in rows:
        table.add_row(*row)
    stdout().print(table)
    stderr().print(table)
    printed = capsys.readouterr()
    for text in (printed.out, printed.err):
        lines = [line.split("  ") for line in text.splitlines()[1:]]
        found = [[cell.strip() for cell in line if cell.strip()] for line in lines]
        assert found == [[cell.strip() for cell in row] for row in rows]


def coloured(origin: str) -> str:
    """What a terminal is sent for a token of this origin."""
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, color_system="standard")
    write_coloured(console, "word", origin)
    return file.getvalue()
