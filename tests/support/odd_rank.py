"""A follower that differs from rank 0: `odd_rank.py version`, `weights`, `part` or `hang FILE`.

`part` passes all checks of versions and files, and then loads another model of the same shape.
`hang` stops computing in the middle of an answer, but goes on beating, once there is the file that
it deletes then.
"""

import sys
import threading
from pathlib import Path

import msgspec

from services.ranks import build, follower
from services.ranks.main import main
from services.ranks.messages import Build, Join, Pass, ToFollower

serve = follower._serve
receive = follower.LeaderChannel.receive
passes: list[Pass] = []
PASSES = 6
_CHANGES = {"version": {"mlx": "0.0.1"}, "weights": {"weights": "0123456789abcdef"}}


def build_oddly(model: str) -> Build:
    """The true build but for one thing."""
    return msgspec.structs.replace(build.build_of(model), **_CHANGES.get(sys.argv[1], {}))


def serve_another(join: Join, leader: follower.LeaderChannel) -> None:
    """As told, but with the model beside the one that was named."""
    serve(msgspec.structs.replace(join, model=f"{join.model}-other"), leader)


def hang_once(leader: follower.LeaderChannel, timeout_s: float | None = None) -> ToFollower:
    """The next message, but for one."""
    message = receive(leader, timeout_s)
    wanted = Path(sys.argv[2])
    if isinstance(message, Pass) and wanted.exists():
        passes.append(message)
    if len(passes) == PASSES:
        wanted.unlink()
        threading.Event().wait()
    return message


if __name__ == "__main__":
    follower.build_of = build_oddly
    if sys.argv[1] == "hang":
        follower.LeaderChannel.receive = hang_once  # type: ignore[method-assign]
    if sys.argv[1] == "part":
        follower._serve = serve_another
    sys.exit(main())
