"""`ssd logs`: the logs of a running stack."""

import json
import time
from pathlib import Path

import click

from launch.stack.run_dir import DEFAULT_NAME, RunDir
from launch.terminal import console
from protocol.errors import UsageError

_TICK_S = 0.2
_LEVELS = ("debug", "info", "warning", "error")


class LogFile:
    """One process's log, read on from where the last reading ended."""

    def __init__(self, path: Path) -> None:
        self.role = path.stem
        self._path = path
        self._offset = 0
        self._half = b""
        self._time = 0.0

    def read_new(self) -> list[tuple[float, str]]:
        """Complete lines that were added, with their times; others take that of the line before."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                added = file.read()
        except OSError:
            return []
        self._offset += len(added)
        *lines, self._half = (self._half + added).split(b"\n")
        found: list[tuple[float, str]] = []
        for line in lines:
            text = line.decode("utf-8", "replace")
            self._time = float(str(parse_line(text).get("time", self._time)))
            found.append((self._time, text))
        return found


def parse_line(line: str) -> dict[str, object]:
    """The fields of a structured line; an empty dict for any other."""
    try:
        fields = json.loads(line)
    except ValueError:
        return {}
    return fields if isinstance(fields, dict) and isinstance(fields.get("time"), float) else {}


def format_line(role: str, line: str) -> str:
    """A line for people: time, role, level, ids, message."""
    fields = parse_line(line)
    if not fields:
        return f"{'':12} {role:12} {line}"
    clock = time.strftime("%H:%M:%S", time.localtime(float(str(fields["time"]))))
    known = ("time", "role", "level", "message", "trace")
    ids = " ".join(f"{name}={value}" for name, value in fields.items() if name not in known)
    trace = f"\n{fields['trace']}" if "trace" in fields else ""
    parts = (f"{clock:12}", f"{role:12}", f"{fields.get('level', ''):8}", ids, fields["message"])
    return " ".join(str(part) for part in parts if part) + trace


def _reaches_level(line: str, level: str) -> bool:
    said = str(parse_line(line).get("level", "error"))
    return said not in _LEVELS or _LEVELS.index(said) >= _LEVELS.index(level)


@click.command("logs")
@click.option("--name", default=DEFAULT_NAME, show_default=True, help="Name of the stack.")
@click.option("--role", multiple=True, help="Only this process (repeatable).")
@click.option("--level", type=click.Choice(_LEVELS), default="debug", help="This level and above.")
@click.option("-f", "--follow", is_flag=True, help="Follow until the stack ends.")
@click.option("--json", "as_json", is_flag=True, help="Print the lines as they were written.")
def command(*, name: str, role: tuple[str, ...], level: str, follow: bool, as_json: bool) -> None:
    """Show the logs of a running stack, ordered by time."""
    run_dir = RunDir(name)
    if run_dir.running() is None:
        raise UsageError(f"no stack named {name!r} is running; logs are removed with their stack")
    files: dict[Path, LogFile] = {}
    while True:
        for path in run_dir.path.glob("*.log"):
            if not role or path.stem in role:
                files.setdefault(path, LogFile(path))
        news = [(at, file.role, line) for file in files.values() for at, line in file.read_new()]
        for _, who, line in sorted(news, key=lambda item: item[0]):
            if _reaches_level(line, level):
                console.write((line if as_json else format_line(who, line)) + "\n")
        if not follow or run_dir.running() is None:
            return
        time.sleep(_TICK_S)
