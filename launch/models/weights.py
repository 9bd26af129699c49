"""The memory of a model folder, computed from the headers of its files."""

import json
import struct
from pathlib import Path
from typing import Any, NamedTuple

from protocol.errors import ModelError
from protocol.safetensors import read_header
from protocol.settings import FREQUENT_TOKENS, MANY_DRAFT_WEIGHTS

_PACKED_ON_CPU = frozenset({"gemma2", "gemma3_text", "llama", "mistral", "phi3", "qwen2", "qwen3"})
"""Architectures whose weights stay packed on a CPU (`services.kernels.cpu.equip`)."""

_FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_SHARED_SCALE = 5 / 16
"""Of a scale of 32 bits from a K-quant: a byte, and a half for eight groups (`cpu/c/layout.h`)."""

_ROUNDED_BYTES = 5 / 8
"""Of a weight of four bits, with a scale and a bias of 16 bits for each 32."""


class Weights(NamedTuple):
    """The size of a model."""

    parameters: int
    bytes_as_stored: int
    bytes_per_pass: int
    """What a pass reads: a row of an embedding that is not the head, and the rows that a trimmed
    head keeps."""
    wide_scale_bytes: int
    """Of these, scales and biases of packed weights that are stored in 32 bits."""
    products: int
    """Weights that a pass multiplies with."""
    kv_elements: int
    """Keys and values of all layers per token of context."""
    context_length: int
    """0 if the model does not specify it."""
    architecture: str

    def bytes_on(self, device: str) -> int:
        """Return the size of the weights in memory; on a CPU, an upper bound."""
        if device != "cpu":
            return self.bytes_as_stored
        return bytes_on_cpu(self.architecture, self.parameters, self.bytes_as_stored)

    def bytes_per_pass_on(self, device: str) -> int:
        """Return the size of the weights that a pass reads."""
        if device != "cpu":
            return self.bytes_per_pass
        if not stays_packed(self.architecture):
            return 4 * self.parameters
        return self.bytes_per_pass - round((1.0 - _SHARED_SCALE) * self.wide_scale_bytes)

    def bytes_per_draft_on(self, device: str) -> int:
        """Return the size of the weights that a drafter's pass reads; a large one rounds them."""
        read = self.bytes_per_pass_on(device)
        rounds = device == "cpu" and stays_packed(self.architecture)
        if not rounds or self.products <= MANY_DRAFT_WEIGHTS:
            return read
        return min(read, round(_ROUNDED_BYTES * self.products))

    def kv_bytes_on(self, device: str) -> int:
        """Return the KV size per token."""
        return self.kv_elements * bytes_of_kv(self.architecture, on_cpu=device == "cpu")


def bytes_on_cpu(architecture: str, parameters: int, stored: int) -> int:
    """Return the stored size, or that of float32 (`services.mlx.loader`)."""
    return stored if stays_packed(architecture) else 4 * parameters


def bytes_of_kv(architecture: str, *, on_cpu: bool) -> int:
    """Return the bytes of a key's or value's number."""
    return 4 if on_cpu and not stays_packed(architecture) else 2


def stays_packed(architecture: str) -> bool:
    """Return True if the CPU kernels compute models of this architecture."""
    return architecture in _PACKED_ON_CPU


def weights_of(folder: Path) -> Weights:
    """Return the size of the model in `folder`.

    Raises:
        ModelError: `config.json` or a weight file is missing or invalid.
    """
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        files = sorted(folder.glob("*.safetensors"))
        tensors = {name: entry for file in files for name, entry in _header(file).items()}
        text = config.get("text_config") or config.get("transformer_layer_config") or config
        heads = int(text.get("num_key_value_heads") or text["num_attention_heads"])
        size = int(text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"])
        layers, context = int(text["num_hidden_layers"]), text.get("max_position_embeddings") or 0
        counts = {name: _elements(name, tensors, config) for name in tensors}
        kept = _share_of_head(folder / "draft_head.json", int(text["vocab_size"]))
    except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
        raise ModelError(f"cannot read the model folder {str(folder)!r}: {error!r}") from error
    if not files:
        raise ModelError(f"the model folder {str(folder)!r} has no safetensors file")
    sizes = {
        name: entry["data_offsets"][1] - entry["data_offsets"][0] for name, entry in tensors.items()
    }
    read = _read_in_a_pass(sizes, kept)
    wide = (
        size
        for name, size in read.items()
        if name.endswith((".scales", ".biases")) and tensors[name]["dtype"] == "F32"
    )
    return Weights(
        parameters=sum(counts.values()),
        bytes_as_stored=sum(sizes.values()),
        bytes_per_pass=sum(read.values()),
        wide_scale_bytes=sum(wide),
        products=sum(_read_in_a_pass(counts, kept).values()),
        kv_elements=2 * layers * heads * size,
        context_length=int(context),
        architecture=str(config.get("model_type", "unknown")),
    )


def _share_of_head(path: Path, size: int) -> float:
    """Return the share of the head's rows that a drafter reads, except on CUDA."""
    kept = json.loads(path.read_bytes())[:FREQUENT_TOKENS] if path.exists() else range(size)
    return len(kept) / size


def _read_in_a_pass(sizes: dict[str, int], kept: float) -> dict[str, int]:
    """Return what a pass reads of these tensors: of a head the share that it keeps."""
    has_head = any(name.startswith("lm_head.") for name in sizes)
    head = "lm_head." if has_head else "embed_tokens."
    return {
        name: round(kept * size) if head in name else size
        for name, size in sizes.items()
        if not (has_head and "embed_tokens." in name)
    }


def _header(file: Path) -> dict[str, Any]:
    header = read_header(file)
    header.pop("__metadata__", None)
    return header


def _elements(name: str, tensors: dict[str, Any], config: dict[str, Any]) -> int:
    """Return the parameters that a tensor represents; 0 for scales and biases of packed weights."""
    entry = tensors[name]
    layer, _, leaf = name.rpartition(".")
    count = 1
    for side in entry["shape"]:
        count *= int(side)
    if f"{layer}.scales" not in tensors or leaf == "bias":
        return count if entry["dtype"] in _FLOATS else 0
    if leaf != "weight":
        return 0
    quantization = config.get("quantization") or config["quantization_config"]
    bits = (
        quantization.get(layer, quantization)["bits"]
        if isinstance(quantization.get(layer), dict)
        else quantization["bits"]
    )
    return count * 32 // int(bits)
