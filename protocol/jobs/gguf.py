"""Metadata of models and of GGUF files, for lists."""

import msgspec


class ModelMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """The metadata of a model."""

    architecture: str = ""
    parameters: int = 0
    quantization: str = ""
    """Bits and group size, or the GGUF type; empty if not quantised."""
    context_length: int = 0
    """Tokens it can attend to; 0 if not specified."""
    weight_bytes: int = 0
    """Size on disk."""
    kv_bytes_per_token: int = 0
    """KV size with 2 bytes per number."""
    vocabulary: str = ""
    """Fingerprint of its token -> id map."""
    vocabulary_size: int = 0
    problem: str = ""
    """Reason why it cannot be used, if any."""


class GGUFDescription(ModelMetadata, frozen=True, kw_only=True):
    """The metadata of a GGUF file."""

    path: str
