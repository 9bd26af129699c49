"""The description of a GGUF file, for lists of models."""

import msgspec


class GGUFDescription(msgspec.Struct, frozen=True, kw_only=True):
    """The metadata of a GGUF file; fields as in `launch.models.catalog.Model`."""

    path: str
    architecture: str = ""
    parameters: int = 0
    quantization: str = ""
    context_length: int = 0
    weight_bytes: int = 0
    kv_bytes_per_token: int = 0
    vocabulary: str = ""
    vocabulary_size: int = 0
    problem: str = ""
    """Reason why it cannot be used, if any."""
