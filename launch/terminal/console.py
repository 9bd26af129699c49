"""What people see: streamed text, coloured drafts, statistics, live process lines."""

import sys

from rich.console import Console
from rich.table import Table
from rich.text import Text as RichText

from protocol.messages import ProcessStatus, Statistics

STYLES = {"target": "", "hit": "green", "miss": "yellow", "lookup": "cyan"}

_FILE_COLUMNS = 160
"""In a file or pipe nothing is cut to a terminal's width."""

LEGEND = (
    "colours: plain = target's own, green = accepted draft after a hit, yellow = after a miss, "
    "cyan = looked up"
)


def stderr() -> Console:
    """Where text for people goes when standard output belongs to machines."""
    return _console(stderr=True)


def stdout() -> Console:
    """Standard output, coloured where it is a terminal."""
    return _console(stderr=False)


def _console(*, stderr: bool) -> Console:
    console = Console(stderr=stderr, highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = max(console.width, _FILE_COLUMNS)
    return console


class _Lines(Console):
    """For those who go on when nobody reads them any more; rich ends the thread that writes."""

    def on_broken_pipe(self) -> None:
        """Say nothing."""
        self.quiet = True


def process_line(status: ProcessStatus) -> None:
    """One line per process and change: role, pid, backend, device, model, state."""
    model = status.model.rstrip("/").rsplit("/", 1)[-1]
    emulated = f"[cost of {status.emulated_cost} emulated] " if status.emulated_cost else ""
    fields = (
        status.role,
        str(status.pid),
        status.backend or "-",
        status.device or "-",
        model or "-",
        emulated + describe_state(status),
    )
    widths = (13, 8, 6, 6, 24, 0)
    line = " ".join(field.ljust(width) for field, width in zip(fields, widths, strict=True))
    _Lines(stderr=True, highlight=False, soft_wrap=True).print(RichText(line.rstrip()))


def describe_state(status: ProcessStatus) -> str:
    """A process's state in words."""
    match status.state:
        case "starting":
            return status.note or "starting"
        case "running":
            return f"ready {status.note}".rstrip()
        case "died" | "lost":
            return f"{status.state} ({status.note})" if status.note else status.state


def long_waits(status: ProcessStatus) -> None:
    """Of the processes of a private stack, only those that take long to load."""
    if status.state == "starting" and status.note:
        process_line(status)


def write(text: str) -> None:
    """Stream a piece of the answer."""
    sys.stdout.write(text)
    sys.stdout.flush()


def ask(prompt: str) -> str:
    """A line of the user's; raises EOFError at the end of the input."""
    return input(prompt)


def write_coloured(console: Console, text: str, origin: str) -> None:
    """Stream a piece of the answer in the colour of its origin."""
    console.print(RichText(text, style=STYLES[origin]), end="")


def statistics_table(statistics: Statistics) -> Table:
    """The statistics of one request, as a reader wants them."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in _rows(statistics):
        table.add_row(name, value)
    return table


def _rows(s: Statistics) -> list[tuple[str, str]]:
    rows = [
        ("speed", f"{s.tok_s:.1f} tok/s ({s.decode_s:.2f} s)"),
        ("time to first token", f"{s.ttft_ms:.0f} ms"),
        ("rounds", f"{s.rounds}"),
        ("acceptance", f"{s.acceptance_rate:.2f} ({s.accepted} of {s.drafted} drafted)"),
        ("mean acceptance length", f"{s.mean_acceptance_length:.2f} tokens per round"),
        ("by position", " ".join(f"{rate:.2f}" for rate in s.per_position) or "-"),
        ("cache hits", f"{s.hit_rate:.2f} ({s.cache_hits} of {s.cache_hits + s.cache_misses})"),
        ("drafting hidden", f"{s.overlap_ratio:.2f}"),
        ("per round, median", ", ".join(f"{k} {s.phase_ms[k]:.2f} ms" for k in _phases(s))),
    ]
    if s.emulated_cost:
        rows.insert(0, ("TARGET COST EMULATED", s.emulated_cost))
    if s.predicted_tok_s:
        rows.insert(1, ("predicted", f"{s.predicted_tok_s:.1f} tok/s"))
    if s.fallbacks:
        rows.append(("fallbacks", ", ".join(f"{k} {n}" for k, n in s.fallbacks.items())))
    if s.drafter_restarts or s.verifier_restarts:
        rows.append(("restarts", f"drafter {s.drafter_restarts}, verifier {s.verifier_restarts}"))
    return rows


def _phases(s: Statistics) -> list[str]:
    """Names of the phases, those of one kind together and by their number."""

    def kind(name: str) -> tuple[str, int]:
        word, _, number = name.rpartition("_")
        return (word, int(number)) if number.isdecimal() else (name, 0)

    return sorted(s.phase_ms, key=kind)
