"""Start and end of every child of the supervisor.

A child reports failure in two ways that need no socket: one line `error: <sentence>` on stderr, and
the exit code of the error's branch (`errors.py`).
"""

import contextlib
import os
import resource
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import TypeVar

import setproctitle

from protocol.errors import RuntimeFailure, SsdError, UsageError
from protocol.process.files import atomic_folder, remove_temporaries
from protocol.process.logs import configure_logging
from protocol.settings import ChildSettings, decode_settings
from protocol.version import describe_missing

ERROR_PREFIX = "error: "
_MOST_DESCRIPTORS = 10_240

C = TypeVar("C", bound=ChildSettings)


def run_child(role: str, kind: type[C], run: Callable[[C], None]) -> int:
    """Run a child process to its end; return its exit code."""

    def body() -> None:
        settings = decode_settings(read_argument(role), kind)
        configure_logging(role, settings.log_level)
        pin_to_cores(settings.cores)
        watch_lifeline(settings.lifeline, settings.on_orphaned)
        run(settings)

    return run_reporting_errors(role, body)


def run_reporting_errors(role: str, body: Callable[[], None]) -> int:
    """Run the body of a process under its role's name; report errors and return its exit code."""
    setproctitle.setproctitle(f"ssd {role}")
    configure_logging(role, "info")
    try:
        body()
    except SsdError as error:
        return _report(str(error), error.exit_code)
    except ModuleNotFoundError as error:
        if missing := describe_missing(error.name or ""):
            return _report(missing, UsageError.exit_code)
        traceback.print_exc()
        return _report(str(error), RuntimeFailure.exit_code)
    except MemoryError:
        return _report(f"the {role} ran out of memory", RuntimeFailure.exit_code)
    # The last line of defence: the supervisor gets one sentence, the log the whole traceback.
    except Exception as error:  # noqa: BLE001
        traceback.print_exc()
        return _report(f"{type(error).__name__}: {error}", RuntimeFailure.exit_code)
    return 0


def find_error(output: str) -> str:
    """Return the last error sentence in a child's stderr; empty if there is none."""
    lines = [line for line in output.splitlines() if line.startswith(ERROR_PREFIX)]
    return lines[-1].removeprefix(ERROR_PREFIX) if lines else ""


def read_argument(role: str) -> str:
    """Return the only argument of a process: its settings."""
    if len(sys.argv) != 2:
        raise UsageError(f"the {role} process is started by `ssd`, not by hand")
    return sys.argv[1]


def _report(sentence: str, code: int) -> int:
    sys.stderr.write(f"{ERROR_PREFIX}{sentence}\n")
    sys.stderr.flush()
    return code


def pin_to_cores(cores: list[int]) -> None:
    """Pin this process to these cores, where the system can (Linux)."""
    if cores and sys.platform == "linux":
        os.sched_setaffinity(0, cores)


def raise_descriptor_limit() -> int:
    """Raise the limit of file descriptors as far as the system allows, within reason.

    Returns:
        The new limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MOST_DESCRIPTORS)
    if soft < most:
        with contextlib.suppress(ValueError, OSError):  # macOS enforces less than it reports
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


@contextlib.contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """Raise SystemExit on SIGTERM; afterwards only SIGKILL interrupts the shutdown."""

    def leave(number: int, frame: FrameType | None) -> None:
        del frame
        signal.signal(number, signal.SIG_IGN)
        raise SystemExit

    signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def watch_lifeline(descriptor: int, on_orphaned: Callable[[], None]) -> None:
    """End this process as soon as the supervisor is gone, whatever the main thread is doing.

    The supervisor holds the other end of the pipe and never writes; end of file means that it has
    died, however it died. `on_orphaned` runs before the end.
    """

    def wait() -> None:
        os.read(descriptor, 1)
        try:
            on_orphaned()
        finally:
            os._exit(0)

    threading.Thread(target=wait, name="lifeline", daemon=True).start()


@contextlib.contextmanager
def produce_folder(folder: Path, lifeline: int | None) -> Iterator[Path]:
    """Fill a folder that replaces `folder` at the end of the block, unless the block raises.

    If the parent that holds the `lifeline` dies, so does this process, and nothing is left.
    """
    if lifeline is not None:
        watch_lifeline(lifeline, lambda: remove_temporaries(folder))
    folder.parent.mkdir(parents=True, exist_ok=True)
    with atomic_folder(folder) as new:
        yield new
