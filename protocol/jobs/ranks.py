"""Settings of the probe of a group of ranks, and its result."""

import msgspec

from protocol.messages import RankStatus
from protocol.settings import Device, RankGroupSettings, Settings


class RankProbeSettings(Settings, frozen=True, kw_only=True):
    """A group to start, measure and end, without loading a model."""

    ranks: RankGroupSettings
    model: str
    """Folder whose copies are compared; empty compares versions only."""
    device: Device = ""


class RankProbeResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The ranks, and the links between them."""

    ranks: list[RankStatus]
    division: str = ""
    """The layers of rank 0; empty without a model, or if it cannot be divided."""
    obstacle: str = ""
    """Reason why it cannot be divided as requested."""
    proposal: list[int] = []
    """Layers per rank that suit the measurements; empty without a pipeline."""
