"""Settings of the reference process, and requests of `ssd bench` and results, a JSON line each."""

from typing import Annotated

import msgspec

from protocol.messages import Sampling, Tokens
from protocol.settings import Device, Settings


class ReferenceSettings(Settings, frozen=True, kw_only=True):
    """The process that runs mlx-lm itself, for comparison."""

    model: str
    draft_model: str = ""
    threads: Annotated[int, msgspec.Meta(ge=1)] = 1
    device: Device = ""
    adapter: str = ""  # as `VerifierSettings`


class DecodeRequest(msgspec.Struct, frozen=True, tag="decode", forbid_unknown_fields=True):
    """Decode with mlx-lm. Answer: DecodeResult."""

    tokens: Tokens
    max_tokens: int
    stop_ids: list[int]
    num_draft_tokens: int = 0
    """Draft tokens per round; 0 decodes without the draft model."""
    sampling: Sampling = Sampling()
    """Parameters for mlx-lm's own sampler: the distribution is the same, the random numbers
    differ.
    """


class DecodeResult(msgspec.Struct, frozen=True):
    """The answer of mlx-lm, and its speed."""

    tokens: Tokens
    ttft_ms: float
    decode_s: float
    """Seconds from the first token to the last."""


class BatchDecodeRequest(
    msgspec.Struct, frozen=True, tag="decode_many", forbid_unknown_fields=True
):
    """Decode all prompts greedily with mlx-lm's batch generator. Answer: BatchDecodeResult."""

    prompts: list[Tokens]
    max_tokens: int
    stop_ids: list[int]
    streams: int
    """Most sequences in a batch."""


class BatchDecodeResult(msgspec.Struct, frozen=True):
    """The answers of mlx-lm to each prompt, and their total time."""

    tokens: list[Tokens]
    ttft_ms: list[float]
    seconds: float


class MarginRequest(msgspec.Struct, frozen=True, tag="margin", forbid_unknown_fields=True):
    """Measure the margin of two candidates for the token after `tokens`. Answer: MarginResult."""

    tokens: Tokens
    candidates: tuple[int, int]
    sampling: Sampling


LARGEST_TIE = 1e-3
"""In float32, two tokens whose scores are closer than this (in logits) are a rounding tie."""

_TIED_SPACINGS = 4.0
"""Tie limit in half precision, in steps of the format at the logits' size: its forward passes
over one token and over several differ by that much.
"""


class MarginResult(msgspec.Struct, frozen=True):
    """The distance between the two candidates."""

    margin: float
    """Distance of their scores in logits; infinite if a filter keeps only one."""
    spacing: float = 0.0
    """Distance between adjacent numbers of the logits' format, at the larger one's size."""

    @property
    def is_tie(self) -> bool:
        """True if rounding alone can have exchanged them."""
        return self.margin <= max(LARGEST_TIE, _TIED_SPACINGS * self.spacing)


ReferenceRequest = DecodeRequest | BatchDecodeRequest | MarginRequest
