"""Logs: one JSON object a line, with ids, without floods, and shown in the order of time."""

import io
import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.stack.log_file import LogFile, format_line, parse_line
from protocol.process.logs import JsonFormatter, RepeatFilter, about


@pytest.fixture
def logged() -> Callable[[], list[dict[str, object]]]:
    """A logger `t` with our handler; what it wrote so far."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter("drafter"))
    handler.addFilter(RepeatFilter())
    logger = logging.getLogger("t")
    logger.handlers, logger.propagate = [handler], False
    logger.setLevel("DEBUG")
    return lambda: [json.loads(line) for line in stream.getvalue().splitlines()]


def test_lines_say_what_they_are_about(logged: Callable[[], list[dict[str, object]]]) -> None:
    """Role, level and ids stand in fields of their own; an exception brings its trace."""
    logging.getLogger("t").warning("it is %s", "late", extra=about(sequence=3, round=5))
    try:
        int("no\nnumber")
    except ValueError:
        logging.getLogger("t").exception("failed")
    first, second = logged()
    assert {
        "role": "drafter",
        "level": "warning",
        "sequence": 3,
        "round": 5,
        "message": "it is late",
    }.items() <= first.items()
    assert "ValueError: invalid literal" in str(second["trace"])


def test_a_flood_is_cut_off(logged: Callable[[], list[dict[str, object]]]) -> None:
    """The same sentence is written twenty times, the last with a note; others still get through."""
    for number in range(500):
        logging.getLogger("t").warning("nonsense %d", number)
    logging.getLogger("t").warning("something else")
    lines = logged()
    assert len(lines) == 21
    assert lines[19]["message"] == "nonsense 19 (and no more of these for 10 s)"
    assert lines[20]["message"] == "something else"


@given(st.text())
def test_any_line_can_be_shown(line: str) -> None:
    """Whatever a process wrote, structured or not, becomes a line for people."""
    assert format_line("verifier", line)
    assert isinstance(parse_line(line), dict)


def test_a_file_is_read_on_from_where_it_ended(tmp_path: Path) -> None:
    """Half a line waits for its other half; a plain line takes the time of the one before."""
    path = tmp_path / "verifier.log"
    path.write_bytes(b'{"time": 5.5, "message": "a"}\nplain\n{"time": 7')
    file = LogFile(path)
    assert file.read_new() == [(5.5, '{"time": 5.5, "message": "a"}'), (5.5, "plain")]
    with path.open("ab") as more:
        more.write(b'.25, "message": "b"}\n')
    assert file.read_new() == [(7.25, '{"time": 7.25, "message": "b"}')]
    assert file.read_new() == []
