"""How a model's makers want it sampled: the `generation_config.json` in its folder."""

from pathlib import Path
from typing import Any

import msgspec

from protocol.errors import ModelError
from protocol.messages import LogitsOptions, Sampling
from protocol.validation import describe

_FILE = "generation_config.json"
_DIRECT = ("temperature", "top_p", "top_k", "min_p")


class _GenerationConfig(msgspec.Struct):
    """What is read of the file; it has many other fields."""

    do_sample: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


def read_model_sampling(folder: str) -> dict[str, Any]:
    """Fields of `Sampling` that the model's makers recommend; empty if they ask for no sampling.

    Args:
        folder: of the model; empty, or one that is on another machine, recommends nothing.

    Raises:
        ModelError: the file cannot be read, or recommends what cannot be done.
    """
    path = Path(folder) / _FILE
    if not folder or not path.is_file():
        return {}
    try:
        config = msgspec.json.decode(path.read_bytes(), type=_GenerationConfig)
        if not config.do_sample:
            return {}
        given = {name: getattr(config, name) for name in _DIRECT}
        chosen: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        chosen.setdefault("temperature", 1.0)  # as transformers has it
        if config.repetition_penalty not in (None, 1.0):
            chosen["logits_options"] = {"repetition_penalty": config.repetition_penalty}
        sampling = msgspec.convert(chosen, Sampling)
    except (OSError, msgspec.DecodeError) as error:
        reason = describe(error) if isinstance(error, msgspec.ValidationError) else str(error)
        raise ModelError(f"{str(path)!r} cannot be used: {reason}; give a --preset") from error
    chosen["logits_options"] = sampling.logits_options
    return chosen


def merge_options(base: LogitsOptions | None, given: dict[str, Any]) -> LogitsOptions | None:
    """The logits options of `base` with those that were given; None if they change nothing."""
    options = msgspec.structs.replace(base or LogitsOptions(), **given)
    return options if options != LogitsOptions() else None
