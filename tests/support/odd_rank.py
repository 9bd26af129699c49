"""A follower that differs from rank 0: `odd_rank.py version`, `weights` or `part`.

`part` passes all checks of versions and files, and then loads another model of the same shape.
"""

import sys

import msgspec

from services.ranks import build, follower
from services.ranks.main import main
from services.ranks.messages import Build, Join

serve = follower._serve
_CHANGES = {"version": {"mlx": "0.0.1"}, "weights": {"weights": "0123456789abcdef"}}


def build_oddly(model: str) -> Build:
    """The true build but for one thing."""
    return msgspec.structs.replace(build.build_of(model), **_CHANGES.get(sys.argv[1], {}))


def serve_another(join: Join, leader: follower.LeaderChannel) -> None:
    """As told, but with the model beside the one that was named."""
    serve(msgspec.structs.replace(join, model=f"{join.model}-other"), leader)


if __name__ == "__main__":
    follower.build_of = build_oddly
    if sys.argv[1] == "part":
        follower._serve = serve_another
    sys.exit(main())
