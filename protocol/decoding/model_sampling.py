"""Sampling parameters that a model recommends: the `generation_config.json` in its folder."""

from pathlib import Path
from typing import Any

import msgspec

from protocol.errors import ModelError
from protocol.messages import LogitsOptions, Sampling
from protocol.validation import describe

_FILE = "generation_config.json"
_DIRECT = ("temperature", "top_p", "top_k", "min_p")


class _GenerationConfig(msgspec.Struct):
    """The fields used of the file; it has many others."""

    do_sample: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


def read_model_sampling(folder: str) -> dict[str, Any]:
    """Return the fields of `Sampling` that the model recommends; empty if it recommends none.

    Args:
        folder: folder of the model; nothing is recommended if it is empty or on another
            machine.

    Raises:
        ModelError: the file cannot be read, or recommends something unsupported.
    """
    path = Path(folder) / _FILE
    if not folder or not path.is_file():
        return {}
    try:
        config = msgspec.json.decode(path.read_bytes(), type=_GenerationConfig)
        if not config.do_sample:
            return {}
        values = {name: getattr(config, name) for name in _DIRECT}
        chosen: dict[str, Any] = {
            name: value for name, value in values.items() if value is not None
        }
        chosen.setdefault("temperature", 1.0)  # transformers' default
        if config.repetition_penalty not in (None, 1.0):
            chosen["logits_options"] = {"repetition_penalty": config.repetition_penalty}
        sampling = msgspec.convert(chosen, Sampling)
    except (OSError, msgspec.DecodeError) as error:
        reason = describe(error) if isinstance(error, msgspec.ValidationError) else str(error)
        raise ModelError(f"{str(path)!r} cannot be used: {reason}; give a --preset") from error
    chosen["logits_options"] = sampling.logits_options
    return chosen


def merge_options(base: LogitsOptions | None, changes: dict[str, Any]) -> LogitsOptions | None:
    """Return the logits options of `base` updated by these; None if they change nothing."""
    options = msgspec.structs.replace(base or LogitsOptions(), **changes)
    return options if options != LogitsOptions() else None
