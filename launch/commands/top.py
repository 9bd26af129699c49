"""`ssd top`: a live view of a running stack."""

import contextlib
from collections import deque

import click
import msgspec
from rich.live import Live

from launch.settings.flags import Command
from launch.stack.run_dir import DEFAULT_NAME
from launch.stack.snapshot import StackObserver, StackSnapshot
from launch.terminal import console
from launch.terminal.dashboard import draw
from launch.terminal.keypress import Keys

_FRAME_S = 1.0
_REMEMBERED = 40
"""Number of speeds in the line of bars."""


@click.command("top", cls=Command)
@click.option("--name", default=DEFAULT_NAME, show_default=True, help="Name of the stack.")
@click.option(
    "--once", is_flag=True, help="Print one frame and exit, as when the output is a pipe."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object per frame.")
def command(name: str, *, once: bool, as_json: bool) -> None:
    """Watch a running stack.

    Processes, requests, speed, and what the planner chose. Speed, acceptance and hits are
    those of the last ten seconds. q or Ctrl-C ends it.
    """
    with contextlib.closing(StackObserver(name)) as observer, contextlib.closing(Keys()) as keys:
        snapshot = observer.first()
        if as_json:
            _print_json(snapshot)
            while not once and keys.wait(_FRAME_S) not in {"q", "Q"}:
                _print_json(observer.look())
        elif once or not console.stdout().is_terminal:
            out = console.stdout()
            out.print(draw(snapshot, [], ""), width=min(out.width, console.FRAME_COLUMNS))
        else:
            _watch(observer, keys, snapshot)


def _print_json(snapshot: StackSnapshot) -> None:
    console.write(msgspec.json.encode(snapshot).decode() + "\n")


def _watch(observer: StackObserver, keys: Keys, snapshot: StackSnapshot) -> None:
    speeds: deque[float] = deque(maxlen=_REMEMBERED)
    with Live(screen=True, auto_refresh=False) as live:
        while True:
            if snapshot.status is not None:
                speeds.append(snapshot.status.window.tok_s)
            live.update(draw(snapshot, list(speeds), "q ends"), refresh=True)
            if keys.wait(_FRAME_S) in {"q", "Q"}:
                return
            snapshot = observer.look()
