"""A follower that differs from rank 0: `odd_rank.py version` or `odd_rank.py weights`."""

import sys

import msgspec

from services.ranks import build, follower
from services.ranks.main import main
from services.ranks.messages import Build

_CHANGES = {"version": {"mlx": "0.0.1"}, "weights": {"weights": "0123456789abcdef"}}


def build_oddly(model: str) -> Build:
    """The true build but for one thing."""
    return msgspec.structs.replace(build.build_of(model), **_CHANGES[sys.argv[1]])


if __name__ == "__main__":
    follower.build_of = build_oddly
    sys.exit(main())
