"""The identity of a vocabulary: a hash of its token -> id map, read from `tokenizer.json`.

Two models can work as a pair only if their maps are equal; the heights of their heads may differ by
padding.
"""

import hashlib
import json
from pathlib import Path
from typing import NamedTuple

import msgspec

from protocol.errors import ModelError
from protocol.messages import Token


class Vocabulary(NamedTuple):
    """The identity of a tokenizer's vocabulary."""

    fingerprint: str
    size: int


def read_vocabulary(folder: Path) -> Vocabulary:
    """Read the vocabulary of the model in `folder`; errors as for `read_ids`."""
    return fingerprint_of(read_ids(folder))


def read_ids(folder: Path) -> dict[str, Token]:
    """Read the token -> id map of the model in `folder`.

    Raises:
        ModelError: there is no readable `tokenizer.json`.
    """
    path = folder / "tokenizer.json"
    try:
        return _parse_ids(path)
    except FileNotFoundError as error:
        raise ModelError(
            f"the model folder {str(folder)!r} has no tokenizer.json; "
            "models with another kind of tokenizer are not supported"
        ) from error
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise ModelError(f"{str(path)!r} is not a tokenizer description ({error!r})") from error


def fingerprint_of(ids: dict[str, Token]) -> Vocabulary:
    """Return the identity of a token -> id map."""
    digest = hashlib.sha256()
    for token, number in sorted(ids.items()):
        digest.update(f"{token}\0{number}\n".encode())
    return Vocabulary(digest.hexdigest()[:16], max(ids.values(), default=-1) + 1)


def _parse_ids(path: Path) -> dict[str, int]:
    content = json.loads(path.read_text(encoding="utf-8"))
    vocab = content["model"]["vocab"]
    pairs = vocab.items() if isinstance(vocab, dict) else _unigram_pairs(vocab)
    added = {entry["content"]: entry["id"] for entry in content["added_tokens"]}
    return msgspec.convert(dict(pairs) | added, dict[str, Token])


def _unigram_pairs(vocab: list[list[object]]) -> list[tuple[object, int]]:
    """Return the pairs of a SentencePiece unigram model, which lists [piece, score] by id."""
    return [(entry[0], number) for number, entry in enumerate(vocab)]
