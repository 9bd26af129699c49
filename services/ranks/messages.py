"""Messages between rank 0 and its followers, over the followers' standard input and output.

Arrays never travel here: MLX's collectives carry them. Rank 0 says which forward pass comes
next, and on which sequences; that is all a follower needs to keep the same KV.
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
    """Variables that name files, and what is to stand in these."""
    model: str
    """Folder of the model, the same path on every machine."""
    loads: bool
    """Whether the model is loaded; otherwise the links are measured, and that is all."""
    split: RankSplit
    beside: int
    """Ranks that share the memory of this machine."""
    device: Device
    cores: list[int]
    threads: int
    """Of the BLAS; 0 leaves it to the follower, which knows its machine."""
    kv_bytes: int
    log_level: LogLevel
    meet_timeout_s: float
    silence_timeout_s: float


class Joined(Message, frozen=True, tag="joined", kw_only=True):
    """Follower -> rank 0: what must be the same on all ranks."""

    pid: int
    build: "Build"


class Build(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Versions and files that make two processes compute the same."""

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
    """Whether its part takes several sequences in a pass."""
    kv_tokens: int
    """Tokens of KV that fit into its memory; 0 means any number."""
    weight_bytes: int
    free_bytes: int
    """What is left of its memory, or of its share of its machine's."""
    latency_ms: float
    """Of a small array to the next rank, there and back, halved."""
    mbytes_per_s: float
    """Of a large one."""
    read_bytes_s: float = 0.0
    """How fast it reads weights; 0: not measured."""
    part: str = ""
    """Its layers, for people: 0-11, or 1/2 of all."""
    pass_ms: float = 0.0
    """Of a pass of one token over all ranks."""
    witness: float = 0.0
    """Size of that pass's logits, which every rank must end in."""


class Fork(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="fork"):
    """Store `number` begins with the first `length` tokens of store `parent`."""

    number: int
    parent: int
    length: int


class Drop(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="drop"):
    """Store `number` is no longer needed."""

    number: int


class SequencePart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One sequence's tokens in a pass: `count` of them, behind the first `start` of its store."""

    number: int
    start: int
    count: int


class Pass(Message, frozen=True, tag="pass", kw_only=True):
    """Rank 0 -> follower: the next forward pass. No answer: the collectives are the answer."""

    changes: list[Fork | Drop]
    """To the stores, in their order, before the pass."""
    parts: list[SequencePart]
    tokens: Tokens
    logits: bool
    """Whether logits are wanted, or only the KV."""


class Prove(Message, frozen=True, tag="prove", kw_only=True):
    """Rank 0 -> follower: the passes of `taps.assist` come next. No answer, as for Pass."""

    layers: list[int]


class Beat(Message, frozen=True, tag="beat"):
    """Either way: this process lives."""


class End(Message, frozen=True, tag="end"):
    """Rank 0 -> follower: exit with code 0."""


class Left(Message, frozen=True, tag="left", kw_only=True):
    """Follower -> rank 0: why it ends now."""

    reason: str
    exit_code: int


ToFollower = Join | Begin | Pass | Prove | Beat | End
FromFollower = Joined | Loaded | Beat | Left
