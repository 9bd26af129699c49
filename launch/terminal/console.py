"""Terminal output: streamed text, coloured drafts, statistics, live process lines."""

import contextlib
import sys
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as ProgressBar
from rich.status import Status
from rich.text import Text as RichText

from launch.models.names import name_of_folder
from protocol.messages import ProcessStatus, Progress

STYLES = {"target": "", "hit": "green", "miss": "yellow", "lookup": "cyan", "branch": "magenta"}

FRAME_COLUMNS = 160
"""Width in a file or pipe of elements that fill the available width."""
_FILE_COLUMNS = 1_000_000
"""Width of a file or pipe: tables are as wide as their content, whatever COLUMNS says."""

LEGEND = (
    "colours: plain = target's own, green = accepted draft after a hit, yellow = after a miss, "
    "cyan = looked up, magenta = of a tree's side branch"
)


def stderr() -> Console:
    """Return a console on stderr, for user messages when standard output is machine-readable."""
    return _console(stderr=True)


def stdout() -> Console:
    """Return a console on standard output, coloured on a terminal."""
    return _console(stderr=False)


def _console(*, stderr: bool) -> Console:
    console = Console(stderr=stderr, highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = _FILE_COLUMNS
    return console


class _Lines(Console):
    """For programs that continue after their output is closed; rich would end the writing
    thread.
    """

    def on_broken_pipe(self) -> None:
        """Ignore a closed output."""
        self.quiet = True


def process_line(status: ProcessStatus) -> None:
    """Print one line per process and change: role, pid, backend, device, model, state."""
    model = name_of_folder(status.model)
    fields = (
        status.role,
        str(status.pid),
        status.backend or "-",
        status.device or "-",
        model or "-",
        describe_state(status),
    )
    widths = (13, 8, 6, 6, 24, 0)
    line = " ".join(field.ljust(width) for field, width in zip(fields, widths, strict=True))
    _Lines(stderr=True, highlight=False, soft_wrap=True).print(RichText(line.rstrip()))


def describe_state(status: ProcessStatus) -> str:
    """Describe a process's state in words."""
    match status.state:
        case "starting":
            return status.note or "starting"
        case "running":
            return f"ready {status.note}".rstrip()
        case "died" | "lost":
            return f"{status.state} ({status.note})" if status.note else status.state


def report_trouble(status: ProcessStatus) -> None:
    """Report processes of a private stack that load for long, died or are lost."""
    if status.note and status.state != "running":
        process_line(status)


class PromptProgress:
    """Progress of a long prompt: a line on the terminal, removed with the first token."""

    def __init__(self) -> None:
        self._console = stderr()
        self._status: Status | None = None

    @property
    def is_wanted(self) -> bool:
        """True if it would be visible."""
        return self._console.is_terminal

    def show(self, progress: Progress) -> None:
        """Show or update the line; a computed prompt needs none."""
        if progress.computed >= progress.prompt_tokens:
            return
        text = f"reading the prompt: {progress.computed} of {progress.prompt_tokens} tokens"
        if self._status is None:
            self._status = self._console.status(text)
            self._status.start()
        else:
            self._status.update(text)

    def clear(self) -> None:
        """Remove the line, if there is one."""
        if self._status is not None:
            self._status.stop()
            self._status = None


@contextlib.contextmanager
def bytes_bar() -> Iterator[Callable[[str, int, int], None]]:
    """Show one progress bar on standard error.

    Yields a callback: the current step, bytes done, and bytes in total (0: unknown).
    """
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with ProgressBar(*columns, console=stderr(), transient=True) as bar:
        task = bar.add_task("", total=None)

        def report(description: str, done: int, total: int) -> None:
            bar.update(task, description=description, completed=done, total=total or None)

        yield report


def note(sentence: str) -> None:
    """Print a sentence for users on standard error."""
    stderr().print(sentence, style="dim", markup=False)


def write(text: str) -> None:
    """Stream a piece of the answer."""
    sys.stdout.write(text)
    sys.stdout.flush()


def write_coloured(console: Console, text: str, origin: str) -> None:
    """Stream a piece of the answer in the colour of its origin."""
    console.print(RichText(text, style=STYLES[origin]), end="")
