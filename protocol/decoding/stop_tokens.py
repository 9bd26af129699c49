"""The tokens that end an answer, as a model folder lists them."""

import json
from pathlib import Path
from typing import Any

from protocol.decoding.vocabulary import read_ids
from protocol.errors import ModelError


def read_stop_ids(folder: Path) -> frozenset[int]:
    """Return the ids of the tokens that end an answer of the model in `folder`.

    Raises:
        ModelError: one of its files is not what it should be.
    """
    stop_ids: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        value = read_json(folder / name).get("eos_token_id")
        stop_ids.update(value if isinstance(value, list) else [] if value is None else [value])
    text = token_text(read_json(folder / "tokenizer_config.json").get("eos_token"))
    if text and (eos := read_ids(folder).get(text)) is not None:
        stop_ids.add(eos)
    return frozenset(stop_ids)


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a file; an empty one if there is no file.

    Raises:
        ModelError: it does not hold a JSON object.
    """
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{str(path)!r} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{str(path)!r} does not hold a JSON object")
    return content


def token_text(value: Any) -> str:
    """Return the text of a special token: a string, or an object with its content."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""
