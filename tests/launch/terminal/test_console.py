"""What people see of an answer: the colour of each token says where it came from."""

import io
import sys

import pytest
from rich.console import Console

from launch.terminal.console import LEGEND, STYLES, process_line, write_coloured
from protocol.messages import ProcessStatus

CODES = {"green": 32, "yellow": 33, "cyan": 36}


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
    assert len({coloured(origin) for origin in STYLES}) == len(STYLES) == 4


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


def coloured(origin: str) -> str:
    """What a terminal is sent for a token of this origin."""
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, color_system="standard")
    write_coloured(console, "word", origin)
    return file.getvalue()
