"""Structured logs: one JSON object a line, with the relevant ids, and without prompts.

Written with `extra=about(request=..., sequence=..., round=...)`. Repeated lines are written a few
times and then counted, so that no peer can fill the disk.
"""

import json
import logging
import sys
import time
from typing import Any, Literal

LogLevel = Literal["debug", "info", "warning", "error"]

_IDS = ("request", "sequence", "round")
_TIMES = 20
_WINDOW_S = 10.0


def about(**ids: int | str) -> dict[str, dict[str, int | str]]:
    """Return the `extra` of a log call: the line's subject in ids and counts, never in text."""
    return {"about": dict(ids)}


class JsonFormatter(logging.Formatter):
    """`{"time", "role", "level", ids, "message"}`; an exception's traceback under `trace`."""

    def __init__(self, role: str) -> None:
        super().__init__()
        self._role = role

    def format(self, record: logging.LogRecord) -> str:
        """Format a record as one line."""
        line: dict[str, Any] = {
            "time": round(record.created, 3),
            "role": self._role,
            "level": record.levelname.lower(),
        }
        line.update(getattr(record, "about", {}))
        line["message"] = record.getMessage()
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


class RepeatFilter(logging.Filter):
    """Lets a sentence (before its values are filled in) pass 20 times in ten seconds."""

    def __init__(self) -> None:
        super().__init__()
        self._since = 0.0
        self._seen: dict[str, int] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return True if this line is to be written."""
        now = time.monotonic()
        if now - self._since > _WINDOW_S:
            self._since, self._seen = now, {}
        count = self._seen[record.msg] = self._seen.get(record.msg, 0) + 1
        if count == _TIMES:
            record.msg = f"{record.msg} (and no more of these for {_WINDOW_S:g} s)"
        return count <= _TIMES or record.levelno <= logging.DEBUG


def configure_logging(role: str, level: LogLevel) -> None:
    """Log to stderr, which the supervisor has redirected to the process's log file."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(role))
    handler.addFilter(RepeatFilter())
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)
    # A full disk may cost log lines, but not the process, nor a traceback per lost line.
    logging.raiseExceptions = False
