"""Messages between rank 0 and its followers, over the followers' standard input and output.

Arrays are not sent here: MLX's collectives carry them. Rank 0 announces the next forward pass and
its sequences; followers need nothing else to keep the same KV.
"""

import msgspec

from protocol.messages import Message, Tokens
from protocol.process.logs import LogLevel
from protocol.settings import Device, RankBackend, RankSplit


class Join(Message, frozen=True, tag="join", kw_only=True):
    """Rank 0 -> follower: the first message. Answer: Joined, or Left."""

    rank: int
    ranks: int
    backend: RankBackend
    environment: dict[str, str]
    """Variables that MLX reads when the group is formed."""
    files: dict[str, str]
    """Variables that name files, and the contents of these files."""
    model: str
    """Folder of the model, the same path on every machine."""
    loads: bool
    """True to load the model; otherwise only the links are measured."""
    split: RankSplit
    local_ranks: int
    """Ranks that share the memory of this machine."""
    device: Device
    cores: list[int]
    threads: int
    """Threads of the BLAS; 0 leaves the number to the follower."""
    kv_bytes: int
    log_level: LogLevel
    meet_timeout_s: float
    silence_timeout_s: float


class Joined(Message, frozen=True, tag="joined", kw_only=True):
    """Follower -> rank 0: what must be the same on all ranks."""

    pid: int
    build: "Build"


class Build(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Versions and files that must agree for two processes to compute the same."""

    ssd: str
    mlx: str
    mlx_lm: str
    weights: str
    """Digest of the model folder: its configuration, and samples of its weights."""


class Begin(Message, frozen=True, tag="begin"):
    """Rank 0 -> follower: all builds agree; form the group and load. Answer: Loaded, or Left."""


class Loaded(Message, frozen=True, tag="loaded", kw_only=True):
    """Follower -> rank 0: its part of the model is in memory."""

    facts: "RankFacts"


class RankFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Facts that one rank reports once it has loaded."""

    compute_unit: str
    shares_passes: bool
    """True if its part takes several sequences in a pass."""
    kv_tokens: int
    """Tokens of KV that fit into its memory; 0 means unlimited."""
    weight_bytes: int
    free_bytes: int
    """Free memory of the rank, or of its share of the machine."""
    latency_ms: float
    """Latency of a small array to the next rank: half a round trip."""
    mbytes_per_s: float
    """Bandwidth of a large array to the next rank."""
    read_bytes_s: float = 0.0
    """Speed of reading weights; 0 means not measured."""
    part: str = ""
    """Its layers in words: 0-11, or 1/2 of all."""
    pass_ms: float = 0.0
    """Time of a pass of one token over all ranks."""
    witness: float = 0.0
    """Magnitude of that pass's logits, which must agree on all ranks."""


class Fork(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="fork"):
    """Store `number` starts with the first `length` tokens of store `parent`."""

    number: int
    parent: int
    length: int


class Drop(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="drop"):
    """Store `number` is no longer needed."""

    number: int


class SequencePart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One sequence's tokens in a pass: `count` of them, after the first `start` of its store."""

    number: int
    start: int
    count: int


class Pass(Message, frozen=True, tag="pass", kw_only=True):
    """Rank 0 -> follower: the next forward pass. It has no reply but the collectives."""

    changes: list[Fork | Drop]
    """Changes to the stores, in order, before the pass."""
    parts: list[SequencePart]
    tokens: Tokens
    logits: bool
    """True if logits are needed, False if only the KV is."""


class Prove(Message, frozen=True, tag="prove", kw_only=True):
    """Rank 0 -> follower: the passes of `taps.assist` come next. No reply, as for Pass."""

    layers: list[int]


class Beat(Message, frozen=True, tag="beat"):
    """Both ways: this process is alive."""


class End(Message, frozen=True, tag="end"):
    """Rank 0 -> follower: exit with code 0."""


class Left(Message, frozen=True, tag="left", kw_only=True):
    """Follower -> rank 0: the reason why it ends."""

    reason: str
    exit_code: int


ToFollower = Join | Begin | Pass | Prove | Beat | End
FromFollower = Joined | Loaded | Beat | Left
