"""The vocabulary's identity: the token -> id map, and nothing else."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.decoding.vocabulary import Vocabulary, read_vocabulary
from protocol.errors import ModelError

VOCAB = {"a": 0, "b": 1, "ab": 2}


def fingerprint(folder: Path, content: Any) -> Vocabulary:
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")
    return read_vocabulary(folder)


def description(vocab: Any, added: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    return {"model": {"type": "BPE", "vocab": vocab}, "added_tokens": added or []}


def test_only_the_map_counts(tmp_path: Path) -> None:
    """Order, merges and normalisers do not change the fingerprint."""
    expected = fingerprint(tmp_path, description(VOCAB))
    other = description(dict(reversed(VOCAB.items()))) | {"normalizer": {"type": "NFC"}}
    other["model"]["merges"] = [["a", "b"]]
    assert expected == fingerprint(tmp_path, other)
    assert expected.size == 3
    assert len(expected.fingerprint) == 16


@pytest.mark.parametrize(
    "vocab",
    [
        {"a": 0, "b": 1, "abc": 2},
        {"a": 0, "b": 1},
        {"a": 0, "b": 1, "ab": 2, "ba": 3},
        {"a": 0, "b": 2, "ab": 1},
        {"A": 0, "b": 1, "ab": 2},
    ],
    ids=str,
)
def test_other_maps_have_other_fingerprints(tmp_path: Path, vocab: dict[str, int]) -> None:
    """A token more, less, renamed or renumbered is another vocabulary."""
    expected = fingerprint(tmp_path, description(VOCAB)).fingerprint
    assert expected != fingerprint(tmp_path, description(vocab)).fingerprint


@given(st.permutations(range(6)), st.permutations(range(6)))
def test_same_size_and_same_map_differ(
    tmp_path_factory: pytest.TempPathFactory, one: list[int], other: list[int]
) -> None:
    """Two numberings of the same tokens share a size, and a fingerprint only if they are equal."""
    folder = tmp_path_factory.mktemp("v")
    first = fingerprint(folder, description(dict(zip("abcdef", one, strict=True))))
    second = fingerprint(folder, description(dict(zip("abcdef", other, strict=True))))
    assert first.size == second.size == 6
    assert (one == other) is (first.fingerprint == second.fingerprint)


def test_added_tokens_count(tmp_path: Path) -> None:
    """Special tokens are part of the map, also where they leave a gap of ids."""
    bare = fingerprint(tmp_path, description(VOCAB))
    added = fingerprint(tmp_path, description(VOCAB, [{"id": 9, "content": "<end>"}]))
    assert bare.fingerprint != added.fingerprint
    assert added.size == 10
    merged = fingerprint(tmp_path, description(VOCAB | {"<end>": 9}))
    assert added == merged


def test_unigram_vocabularies_are_numbered_by_place(tmp_path: Path) -> None:
    """A list of [piece, score] is the map from piece to index."""
    pieces = [["a", -1.0], ["b", -2.0], ["ab", -3.0]]
    expected = fingerprint(tmp_path, description(VOCAB))
    assert expected == fingerprint(tmp_path, description(pieces))


def test_a_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    """The error names the folder and what is missing."""
    with pytest.raises(ModelError, match=r"has no tokenizer\.json") as caught:
        read_vocabulary(tmp_path)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "not json",
        "[]",
        "null",
        "{}",
        {"model": {}, "added_tokens": []},
        {"model": {"vocab": None}, "added_tokens": []},
        {"model": {"vocab": {}}},
        {"model": {"vocab": {}}, "added_tokens": [{"content": "x"}]},
        {"model": {"vocab": [[]]}, "added_tokens": []},
        {"model": {"vocab": {"a": "zero"}}, "added_tokens": []},
    ],
    ids=str,
)
def test_broken_descriptions_are_refused(tmp_path: Path, content: Any) -> None:
    """A file of another shape is a ModelError that names the file."""
    with pytest.raises(ModelError, match="is not a tokenizer description"):
        fingerprint(tmp_path, content)


def test_bytes_that_are_not_text_are_refused(tmp_path: Path) -> None:
    """A file that is not UTF-8 is a ModelError."""
    (tmp_path / "tokenizer.json").write_bytes(b'{"\xff"')
    with pytest.raises(ModelError, match="is not a tokenizer description"):
        read_vocabulary(tmp_path)
