"""Read the `config.json` of a Llama-type model or a Gemma 3; refuse what the builder cannot say."""

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from protocol.decoding.sampler import Floats
from protocol.errors import ModelError

Doubles = npt.NDArray[np.float64]

_GEMMA = "gemma3_text"
_GEMMA_STREAM = 2.0**-7
"""Scale of its residual stream, which exceeds float16 (82,816 in the one of 270M parameters)."""
KNOWN_TYPES = ("llama", "qwen2", "qwen3", "mistral", _GEMMA)


class Rope(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Rotary positions, half-split layout."""

    frequencies: list[float]
    """[head_dim / 2] radians per position."""
    scale: float = 1.0
    """YaRN: factor for the rotated vectors."""

    def tables(self, positions: int) -> tuple[Floats, Floats]:
        """Return cos and sin, [positions, head_dim / 2] float32."""
        angles = np.arange(positions)[:, None] * np.array(self.frequencies)
        return (
            (self.scale * np.cos(angles)).astype(np.float32),
            (self.scale * np.sin(angles)).astype(np.float32),
        )


class Architecture(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The shape of a model; its tensors show biases and q/k norms."""

    model_type: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    eps: float
    tied: bool
    rope: Rope
    local_rope: Rope | None = None
    """Of layers with a window, if there are any."""
    window: int = 0
    """Tokens that those layers see."""
    pattern: int = 1
    """Every layer of this number has no window."""
    query_scale: float = 0.0
    """Factor of the scores; 0: one over the root of `head_dim`."""

    @property
    def is_gemma(self) -> bool:
        """True for norms of 1 + weight, also behind attention and MLP, GELU, scaled embeddings."""
        return self.model_type == _GEMMA

    def is_local(self, layer: int) -> bool:
        """Return True if a layer has a window."""
        return self.window > 0 and (layer + 1) % self.pattern != 0

    @property
    def score_scale(self) -> float:
        """Factor of the scores."""
        return self.query_scale or self.head_dim**-0.5

    @property
    def stream_scale(self) -> float:
        """Factor of the residual stream, all of whose readers are norms."""
        return _GEMMA_STREAM if self.is_gemma else 1.0

    @property
    def embedding_scale(self) -> float:
        """Factor of the embedding; a Gemma's is rounded to bfloat16, as in mlx-lm."""
        if not self.is_gemma:
            return 1.0
        bits = np.float32(self.width**0.5).view(np.uint32) + np.uint32(0x8000)
        return self.stream_scale * float((bits & np.uint32(0xFFFF0000)).view(np.float32))

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.heads // self.kv_heads


def read_architecture(folder: Path) -> Architecture:
    """Read the architecture of the model in `folder`.

    Raises:
        ModelError: there is none, or it is not of a kind that can be converted.
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        _check(config, path)
        heads = config["num_attention_heads"]
        head_dim = config.get("head_dim") or config["hidden_size"] // heads
        return Architecture(
            model_type=config["model_type"],
            layers=config["num_hidden_layers"],
            width=config["hidden_size"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=head_dim,
            vocabulary=config["vocab_size"],
            eps=config["rms_norm_eps"],
            tied=config.get("tie_word_embeddings", True),
            rope=_rope(config, head_dim, path),
            **(_gemma(config, head_dim) if config["model_type"] == _GEMMA else {}),
        )
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"{str(path)!r} cannot be read as a model's ({error!r})") from error


def _check(config: dict[str, Any], path: Path) -> None:
    kind = config.get("model_type")
    if kind not in KNOWN_TYPES:
        raise ModelError(
            f"{str(path)!r} describes a {kind!r} model; can be converted: {', '.join(KNOWN_TYPES)}"
        )
    windows = kind != _GEMMA and "sliding_attention" in (config.get("layer_types") or ())
    windowed = kind == "mistral" and config.get("sliding_window")
    if windows or windowed or (config.get("sliding_window") and config.get("use_sliding_window")):
        raise ModelError(f"{str(path)!r} has sliding-window layers, which cannot be converted")
    if config.get("rope_traditional"):
        raise ModelError(f"{str(path)!r} has interleaved RoPE, which cannot be converted")


def _gemma(config: dict[str, Any], head_dim: int) -> dict[str, Any]:
    """Return what only Gemma 3 has, with mlx-lm's defaults."""
    base = float(config.get("rope_local_base_freq", 1e4))
    frequencies: Doubles = base ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    return {
        "local_rope": Rope(frequencies.tolist()),
        "window": config.get("sliding_window", 512),
        "pattern": config.get("sliding_window_pattern", 6),
        "query_scale": float(config.get("query_pre_attn_scalar", 256)) ** -0.5,
    }


def _rope(config: dict[str, Any], head_dim: int, path: Path) -> Rope:
    """Return the frequencies by the rules of mlx-lm's `rope_utils`."""
    parameters = config.get("rope_parameters") or {}
    default = 1e6 if config["model_type"] in {"qwen2", _GEMMA} else 1e4
    base = config.get("rope_theta") or parameters.get("rope_theta") or default
    scaling = config.get("rope_scaling") or parameters
    kind = scaling.get("type") or scaling.get("rope_type", "default")
    plain: Doubles = base ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    match kind:
        case "default":
            return Rope(plain.tolist())
        case "linear":
            return Rope((plain / scaling["factor"]).tolist())
        case "llama3":
            return Rope(_llama3(plain, scaling).tolist())
        case "yarn":
            return _yarn(plain, base, scaling)
    raise ModelError(f"{str(path)!r} has {kind!r} RoPE scaling, which cannot be converted")


def _llama3(plain: Doubles, scaling: dict[str, Any]) -> Doubles:
    """Stretch long wavelengths by the factor, keep short ones, and blend those between."""
    factor = scaling["factor"]
    low = scaling.get("low_freq_factor", 1.0)
    high = scaling.get("high_freq_factor", 4.0)
    turns = scaling.get("original_max_position_embeddings", 8192) * plain / (2 * math.pi)
    blend = np.clip((turns - low) / (high - low), 0, 1)
    stretched: Doubles = plain * ((1 - blend) / factor + blend)
    return stretched


def _yarn(plain: Doubles, base: float, scaling: dict[str, Any]) -> Rope:
    """Apply YaRN (Peng et al., 2023): interpolate slow dimensions, keep the fast ones."""
    factor = scaling["factor"]
    original = scaling.get("original_max_position_embeddings", 4096)
    size = 2 * len(plain)

    def dimension(turns: float) -> float:
        return size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(dimension(scaling.get("beta_fast", 32))), 0)
    high = min(math.ceil(dimension(scaling.get("beta_slow", 1))), size - 1)
    ramp = np.clip((np.arange(len(plain)) - low) / max(high - low, 1e-3), 0, 1)
    blended = plain / factor * ramp + plain * (1 - ramp)

    def magnitude(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if scaling.get("mscale_all_dim"):
        raise ModelError("YaRN with mscale_all_dim cannot be converted")
    return Rope(blended.tolist(), magnitude(scaling.get("mscale", 1)) / magnitude(0))
