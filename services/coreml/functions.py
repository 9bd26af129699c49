"""Which functions a package has, and their shapes. Everything in it is fixed: CoreML compiles
one program per function, and flexible shapes fall off the Neural Engine."""

from typing import Annotated

import msgspec

HEAD_ROWS = 16384
"""Most rows of one product of the head; older Neural Engines take no larger dimension."""

MASKED = -1e4
"""What a query adds to the score of a slot that it must not see; infinities become NaN."""


class PackageFunction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One function of a package."""

    name: str
    tokens: Annotated[int, msgspec.Meta(ge=1)]
    """Queries of a call; a shorter call is padded."""
    stateful: bool
    """Keys and values in CoreML states; else the past comes in and the new ones go out."""
    head: bool
    """Whether it ends in the best tokens of every query."""


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Some consecutive layers as one package; a large model is several."""

    file: str
    first: int
    stop: int
    """Layers [first, stop)."""

    @property
    def layers(self) -> int:
        """Number of faults."""
        return self.stop - self.first


def functions_of(branches: int, chunk: int) -> list[PackageFunction]:
    """Those of a drafter: branches, one token, a prompt; and a prompt without state."""
    return [
        PackageFunction("tree", branches, stateful=True, head=True),
        PackageFunction("decode", 1, stateful=True, head=True),
        PackageFunction("prefill", chunk, stateful=True, head=False),
        PackageFunction("prefill_kv", chunk, stateful=False, head=False),
    ]


def parts_of(layers: int, per_part: int) -> list[Part]:
    """The packages of a model; `per_part` 0 is all layers in one."""
    step = per_part or layers
    cuts = [(first, min(first + step, layers)) for first in range(0, layers, step)]
    if len(cuts) == 1:
        return [Part("model.mlpackage", 0, layers)]
    return [Part(f"part{i}.mlpackage", first, stop) for i, (first, stop) in enumerate(cuts)]
