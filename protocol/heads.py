"""Published heads: small drafters that read the target's hidden states.

A head's folder is used as its authors published it: `config.json` and safetensors. Its format, the
features it reads and its compatibility with a target are determined here, from the small files
alone, so that an incompatible head is rejected before any process starts.
"""

import json
import struct
from pathlib import Path
from typing import Any, Literal

import msgspec

from protocol.errors import ModelError
from protocol.safetensors import read_header

HeadFormat = Literal["eagle3", "mtp", "dflash", "dflash2", "dspark"]

Config = dict[str, Any]
_MTP = "mtp."


class HeadDescription(msgspec.Struct, frozen=True, kw_only=True):
    """A head that fits its target."""

    folder: str
    format: HeadFormat
    layers: list[int]
    """Layers whose output it reads, from 0."""
    config: Config
    """The configuration of its layers, with the format's additions."""
    tensors: dict[str, list[int]]
    """Shapes, by the names in the files."""
    files: dict[str, str]
    """File of each tensor."""
    target_hidden_size: int
    vocabulary_size: int
    """Rows of the target's embedding."""

    def value(self, name: str, default: Any = None) -> Any:
        """Return an entry of the configuration, or of a nested one."""
        for part in ("dflash_config", "dspark_config", "eagle_config"):
            nested = self.config.get(part)
            if isinstance(nested, dict) and nested.get(name) is not None:
                return nested[name]
        entry = self.config.get(name)
        return default if entry is None else entry


def describe_head(folder: Path, target: Path) -> HeadDescription | None:
    """Describe the head in `folder`; return None if it holds something else.

    Args:
        folder: folder as published.
        target: the model to draft for.

    Raises:
        ModelError: the head is broken, of an unsupported kind, or made for another target.
    """
    config = _read_config(folder)
    if config is None:
        return None
    shape = _text(_read_config(target) or {})
    head_format = _format_by_name(config)
    if head_format is None and not _may_hold_mtp(config):
        return None
    tensors, files = _read_tensors(folder)
    if head_format is None:
        if not _is_mtp(folder, target, config, shape, tensors):
            return None
        head_format = "mtp"
    head, differences = _compare(folder, head_format, _merge(config), shape, (tensors, files))
    if differences:
        raise ModelError(
            f"the head {str(folder)!r} ({head_format}) was not made for the target "
            f"{str(target)!r}: {'; '.join(differences)}"
        )
    return head


def _compare(
    folder: Path,
    head_format: HeadFormat,
    config: Config,
    shape: Config,
    contents: tuple[dict[str, list[int]], dict[str, str]],
) -> tuple[HeadDescription, list[str]]:
    """Return the head, and its incompatibilities with a target of this shape."""
    try:
        head = HeadDescription(
            folder=str(folder),
            format=head_format,
            layers=_layers(head_format, config, shape),
            config=config,
            tensors=contents[0],
            files=contents[1],
            target_hidden_size=int(shape["hidden_size"]),
            vocabulary_size=int(shape["vocab_size"]),
        )
        return head, _differences(head, shape)
    except KeyError as error:
        raise ModelError(f"config.json of the head {str(folder)!r} lacks {error}") from error
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        raise ModelError(f"config.json of the head {str(folder)!r} is wrong: {error}") from error


def _read_config(folder: Path) -> Config | None:
    """Read the configuration; return None if it is missing or invalid, which other checks
    report.
    """
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return config if isinstance(config, dict) else None


def _text(config: Config) -> Config:
    """Return the part that describes the language model."""
    nested = config.get("text_config")
    return config | nested if isinstance(nested, dict) else config


def _merge(config: Config) -> Config:
    """Merge top-level and layer configurations; the `speculators` format nests the layer's."""
    nested = config.get("transformer_layer_config")
    merged = config | nested if isinstance(nested, dict) else dict(config)
    return _text(merged)


def _format_by_name(config: Config) -> HeadFormat | None:
    """Return the format that the configuration names."""
    names = [*_architectures(config), config.get("speculators_model_type") or ""]
    text = " ".join(str(name).lower() for name in names)
    formats: tuple[HeadFormat, ...] = ("eagle3", "dflash2", "dflash", "dspark")
    return next((kind for kind in formats if kind in text), None)


def _may_hold_mtp(config: Config) -> bool:
    return str(_text(config).get("model_type", "")).startswith("qwen3_5") or any(
        "mtp" in str(name).lower() for name in _architectures(config)
    )


def _architectures(config: Config) -> list[Any]:
    named = config.get("architectures")
    return named if isinstance(named, list) else []


def _is_mtp(
    folder: Path, target: Path, config: Config, shape: Config, tensors: dict[str, list[int]]
) -> bool:
    """Return True if the folder is to be used for its MTP layers.

    Qwen's checkpoints hold them together with the model. Such a folder can also draft as a model,
    and does unless it has the target's own size.
    """
    held = [name for name in tensors if _MTP in name]
    if not held:
        return False
    if len(held) == len(tensors) or folder.resolve() == target.resolve():
        return True
    text = _text(config)
    return all(text.get(n) == shape.get(n) for n in ("hidden_size", "num_hidden_layers"))


def _read_tensors(folder: Path) -> tuple[dict[str, list[int]], dict[str, str]]:
    """Read the shape and file of every tensor."""
    shapes: dict[str, list[int]] = {}
    places: dict[str, str] = {}
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise ModelError(
            f"the head {str(folder)!r} has no safetensors file; other formats of weights can "
            "run code when they are read, so convert it once"
        )
    for path in paths:
        try:
            for name, entry in read_header(path).items():
                if name != "__metadata__":
                    shapes[name] = [int(side) for side in entry["shape"]]
                    places[name] = str(path)
        except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
            raise ModelError(f"{str(path)!r} cannot be read: {error!r}") from error
    return shapes, places


def _layers(head_format: HeadFormat, config: Config, target: Config) -> list[int]:
    """Return the layers whose output the head reads."""
    count = int(target["num_hidden_layers"])
    if head_format == "mtp":
        return [count - 1]
    if head_format == "eagle3":
        return _eagle3_layers(config, count)
    nested = config.get("dflash_config") or config.get("dspark_config") or {}
    return [int(i) for i in nested.get("target_layer_ids") or config["target_layer_ids"]]


def _eagle3_layers(config: Config, count: int) -> list[int]:
    """Return the layers whose output an EAGLE-3 head reads, of a target of `count` layers.

    Two conventions share one name. The top-level numbers of vLLM and speculators name layers that
    the states enter, that is one more; those of SGLang and NVIDIA, in `eagle_config`, name layers
    that the states leave. Conversions copied the latter to the place of the former, and are
    recognised by their defaults.
    """
    name, default = "eagle_aux_hidden_state_layer_ids", [1, count // 2 - 1, count - 4]
    nested = config.get("eagle_config")
    left = nested.get(name) if isinstance(nested, dict) else None
    entered = config.get(name)
    if entered and list(entered) != default:
        return [int(layer) - 1 for layer in entered]
    return [int(layer) for layer in left or default]


def _differences(head: HeadDescription, target: Config) -> list[str]:
    """Return the differences between the head and this target, in words."""
    config, differences = head.config, []
    count, kind = int(target["num_hidden_layers"]), str(target.get("model_type", "unknown"))
    if min(head.layers) < 0 or max(head.layers) >= count:
        differences.append(
            f"it reads the layers {head.layers}, and the target has 0 to {count - 1}"
        )
    made_for = config.get("num_target_layers")
    if made_for is not None and int(made_for) != count:
        differences.append(f"it was made for {made_for} layers, and the target has {count}")
    if head.format == "mtp":
        if not kind.startswith("qwen3_5"):
            differences.append(f"it was made for the Qwen 3.5 family, and the target is {kind!r}")
        elif int(config["num_hidden_layers"]) != count:
            differences.append(
                f"it was made for {config['num_hidden_layers']} layers, and the target has {count}"
            )
    width = _width_read(head)
    if width != head.target_hidden_size:
        differences.append(
            f"it reads states of {width} numbers, and the target's have {head.target_hidden_size}"
        )
    rows = int(config["vocab_size"])
    if rows != head.vocabulary_size:
        differences.append(
            f"its vocabulary has {rows} rows, and the target's {head.vocabulary_size}"
        )
    return differences


def _width_read(head: HeadDescription) -> int:
    """Return the hidden size per layer that the head expects."""
    if head.format == "mtp":
        return int(head.config["hidden_size"])
    name = next((n for n in head.tensors if n.endswith("fc.weight")), None)
    if name is None:
        raise ModelError(f"the head {head.folder!r} has no tensor fc.weight")
    shape = head.tensors[name]
    # A quantised matrix has fewer columns than values.
    packed = name.removesuffix("weight") + "scales" in head.tensors
    if packed or len(shape) != 2 or shape[1] % len(head.layers):
        return int(head.value("target_hidden_size") or head.config["hidden_size"])
    return shape[1] // len(head.layers)
