"""Logs of a stack's processes: files of structured lines, read while they grow."""

import json
import time
from pathlib import Path


class LogFile:
    """One process's log, read from the end of the last reading."""

    def __init__(self, path: Path) -> None:
        self.role = path.stem
        self._path = path
        self._offset = 0
        self._half = b""
        self._time = 0.0

    def read_new(self) -> list[tuple[float, str]]:
        """Return new complete lines with their times; lines without one take the previous
        line's.
        """
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                added = file.read()
        except OSError:
            return []
        self._offset += len(added)
        *lines, self._half = (self._half + added).split(b"\n")
        timed: list[tuple[float, str]] = []
        for line in lines:
            text = line.decode("utf-8", "replace")
            self._time = float(str(parse_line(text).get("time", self._time)))
            timed.append((self._time, text))
        return timed


def parse_line(line: str) -> dict[str, object]:
    """Return the fields of a structured line; an empty dict for any other."""
    try:
        fields = json.loads(line)
    except ValueError:
        return {}
    return fields if isinstance(fields, dict) and isinstance(fields.get("time"), float) else {}


def format_line(role: str, line: str) -> str:
    """Format a line for users: time, role, level, ids, message."""
    fields = parse_line(line)
    if not fields:
        return f"{'':12} {role:12} {line}"
    clock = time.strftime("%H:%M:%S", time.localtime(float(str(fields["time"]))))
    standard = ("time", "role", "level", "message", "trace")
    ids = " ".join(f"{name}={value}" for name, value in fields.items() if name not in standard)
    trace = f"\n{fields['trace']}" if "trace" in fields else ""
    parts = (f"{clock:12}", f"{role:12}", f"{fields.get('level', ''):8}", ids, fields["message"])
    return " ".join(str(part) for part in parts if part) + trace
