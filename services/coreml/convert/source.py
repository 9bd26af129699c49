"""The tensors of a model during conversion, each compressed once."""

from pathlib import Path

import msgspec
import numpy as np

from protocol.decoding.sampler import Floats, Ids
from protocol.errors import ModelError
from protocol.jobs.convert import Compression
from protocol.messages import Token
from protocol.settings import FREQUENT_TOKENS
from services.coreml.architecture import Architecture, read_architecture
from services.coreml.convert.compression import Packed, pack
from services.coreml.convert.weights import ModelTensors

HEAD_FILE = "draft_head.json"
"""Token ids of a trimmed head (`services/mlx/lm_head.py` reads the same file for MLX)."""


_BEFORE_SUMS = ("post_attention_layernorm", "post_feedforward_layernorm")
_OF_HEADS = ("q_norm", "k_norm")
"""Norms of a Gemma that do not read its residual stream."""


class Source:
    """The model in a folder, in the form that the builder needs."""

    def __init__(self, folder: Path, compression: Compression) -> None:
        """Open the folder; raises ModelError if it cannot be converted."""
        self.folder = folder
        self.architecture: Architecture = read_architecture(folder)
        self._weights = ModelTensors(folder)
        self._compression: Compression = compression
        self._packed: dict[tuple[str, float], Packed] = {}
        self.head_ids = _head_ids(folder, self.architecture.vocabulary)

    def __contains__(self, name: str) -> bool:
        return name in self._weights

    @property
    def head_size(self) -> int:
        """Number of columns of the logits."""
        return self.architecture.vocabulary if self.head_ids is None else len(self.head_ids)

    def weight(self, layer: str, scale: float = 1.0) -> Packed:
        """Return the weight of a linear layer, times `scale`."""
        key = (layer, scale)
        if key not in self._packed:
            self._packed[key] = pack(self._weights.matrix(layer) * scale, self._compression)
        return self._packed[key]

    def head(self) -> Packed:
        """Return the output head, [columns, width]."""
        key = ("head", 1.0)
        if key not in self._packed:
            tied = self.architecture.tied
            matrix = self._weights.matrix("model.embed_tokens" if tied else "lm_head")
            rows = matrix if self.head_ids is None else matrix[self.head_ids]
            self._packed[key] = pack(rows, self._compression)
        return self._packed[key]

    def embedding(self) -> Floats:
        """Return the embedding as the first layer gets it, [vocabulary, width]."""
        return self._weights.matrix("model.embed_tokens") * np.float32(
            self.architecture.embedding_scale
        )

    def norm(self, name: str) -> tuple[Floats, float]:
        """Return a norm's weight and epsilon."""
        weight, eps = self._weights.vector(f"{name}.weight"), self.architecture.eps
        if self.architecture.is_gemma:
            weight, scale = weight + 1, np.float32(self.architecture.stream_scale)
            if name.endswith(_BEFORE_SUMS):
                weight = weight * scale
            elif not name.endswith(_OF_HEADS):
                eps *= float(scale) ** 2
        return weight, eps

    def bias(self, layer: str) -> Floats | None:
        """Return the bias of a linear layer, if it has one."""
        name = f"{layer}.bias"
        return self._weights.vector(name) if name in self._weights else None


def _head_ids(folder: Path, vocabulary: int) -> Ids | None:
    path = folder / HEAD_FILE
    if not path.exists():
        return None
    try:
        ids = np.array(msgspec.json.decode(path.read_bytes(), type=list[Token]), dtype=np.int64)
    except (OSError, msgspec.DecodeError) as error:
        raise ModelError(f"{str(path)!r} is not a list of token ids ({error})") from error
    if not ids.size or ids.max() >= vocabulary or np.unique(ids).size != ids.size:
        raise ModelError(f"{str(path)!r} is not a list of distinct ids below {vocabulary}")
    return ids[:FREQUENT_TOKENS]
