"""`python -m services.ranks.main`: a follower in a group of ranks, started by rank 0.

It is controlled over standard input and output; the end of its input is a clean exit.
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
    """Run a follower and return the process's exit code."""

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
    """Have the kernel kill this process when its parent dies, where it can (Linux).

    The end of the input ends this process too, but not while it is stopped.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
