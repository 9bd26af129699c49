"""The settings of the probe of a group of ranks, and its answer."""

import msgspec

from protocol.messages import RankStatus
from protocol.settings import Device, RankGroupSettings, Settings


class RankProbeSettings(Settings, frozen=True, kw_only=True):
    """A group to start, to measure and to end, without a model in memory."""

    ranks: RankGroupSettings
    model: str
    """Folder whose copies are compared; empty compares versions alone."""
    device: Device = ""


class RankProbeResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The ranks, and the links between them."""

    ranks: list[RankStatus]
    division: str = ""
    """The layers of rank 0; empty without a model, or where it cannot be divided."""
    obstacle: str = ""
    """Why it cannot be divided as asked."""
    proposal: list[int] = []
    """Layers per rank that suit what was measured; empty where there is no pipeline."""
