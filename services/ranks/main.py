"""`python -m services.ranks.main`: a follower in a group of ranks, started by rank 0.

It is spoken to on standard input and output; the end of its input is a clean exit.
"""

import contextlib
import ctypes
import signal
import sys

from protocol.errors import RuntimeFailure, SsdError, StreamEnded
from protocol.process.child import run_reporting_errors
from protocol.transport.pipes import take_pipes
from services.ranks.follower import LeaderChannel, follow
from services.ranks.messages import Left

_PR_SET_PDEATHSIG = 1


def main() -> int:
    """The process's exit code."""

    _end_with_parent()

    def body() -> None:
        leader = LeaderChannel(take_pipes())
        try:
            follow(leader)
        except StreamEnded:
            return
        except Exception as error:
            code = error.exit_code if isinstance(error, SsdError) else RuntimeFailure.exit_code
            reason = (
                str(error) if isinstance(error, SsdError) else f"{type(error).__name__}: {error}"
            )
            with contextlib.suppress(RuntimeFailure):
                leader.send(Left(reason=reason, exit_code=code))
            raise

    return run_reporting_errors("rank", body)


def _end_with_parent() -> None:
    """Let the kernel kill this process with the one that started it, where it can (Linux).

    The end of our input ends us too, but not while we are stopped.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
