"""Answers that are bound to a grammar end before their limit cuts them off."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from protocol.decoding.closing import find_end
from protocol.decoding.grammar import Grammar, json_grammar
from protocol.decoding.logits_processor import LogitsProcessor
from protocol.messages import LogitsOptions, Tokens
from tests.support.tiny_models import EOS, tokenizer_json

ITEM = {
    "type": "object",
    "properties": {"a": {"type": "string"}, "n": {"type": "integer", "minimum": 10}},
    "required": ["a", "n"],
    "additionalProperties": False,
}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "kind": {"enum": ["red", "green"]}},
    "required": ["name", "kind"],
    "additionalProperties": False,
}
SCHEMAS: list[tuple[dict[str, Any], int]] = [
    ({}, 12),
    ({"type": "object"}, 12),
    ({"type": "object", "additionalProperties": {"type": "integer"}}, 14),
    ({"type": "array", "items": {"type": "string", "minLength": 3}}, 14),
    ({"type": "array", "items": ITEM}, 60),
    (PERSON, 60),
    ({"type": "string"}, 12),
    ({"type": "string", "pattern": "^[a-c]{3,}$"}, 16),
    ({"type": "number"}, 12),
    ({"anyOf": [PERSON, {"type": "null"}]}, 60),
]
"""With the fewest tokens that are tried."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    (path / "tokenizer.json").write_text(tokenizer_json(), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return Tokenizer.from_str(tokenizer_json())


def draw(size: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=size).astype(np.float32)


def answer(processor: LogitsProcessor, size: int, limit: int, seed: int) -> Tokens:
    """The tokens of a model of random taste, up to its limit."""
    tokens: Tokens = []
    while len(tokens) < limit:
        token = int(processor.process(draw(size, 1000 * seed + len(tokens))).argmax())
        if token == EOS:
            break
        processor.extend([token])
        tokens.append(token)
    return tokens


def test_answers_end_before_their_limit(folder: Path, tokenizer: Any) -> None:
    """Whatever the model would say, what comes is JSON, for every schema and limit."""
    size = tokenizer.get_vocab_size()
    for schema, least in SCHEMAS:
        for limit in (least, 20 + least, 40 + least):
            shape = LogitsOptions(grammar=json_grammar(schema), answer_until=limit, stop_ids=(EOS,))
            tokens = answer(LogitsProcessor(shape, folder, []), size, limit, seed=limit)
            assert len(tokens) < limit
            json.loads(tokenizer.decode(tokens))


def test_the_way_to_the_end_is_a_function_of_the_tokens(folder: Path, tokenizer: Any) -> None:
    """Going back and branching leave what a fresh start would have, near the limit, too."""
    size = tokenizer.get_vocab_size()
    shape = LogitsOptions(grammar=json_grammar(PERSON), answer_until=60, stop_ids=(EOS,))
    processor = LogitsProcessor(shape, folder, [])
    tokens = answer(processor, size, 60, seed=3)
    for length in range(len(tokens), 0, -5):
        row = draw(size, length)
        fresh = LogitsProcessor(shape, folder, tokens[:length]).process(row)
        assert np.array_equal(processor.branch(length).process(row), fresh)
        processor.rewind(length)
        assert np.array_equal(processor.process(row), fresh)


def test_far_from_the_limit_nothing_changes(folder: Path, tokenizer: Any) -> None:
    """The grammar alone decides what may come, until the end has to begin."""
    size, grammar = tokenizer.get_vocab_size(), json_grammar(PERSON)
    free = LogitsOptions(grammar=grammar, stop_ids=(EOS,))
    limited = LogitsOptions(grammar=grammar, answer_until=5000, stop_ids=(EOS,))
    both = [LogitsProcessor(shape, folder, []) for shape in (free, limited)]
    for step in range(30):
        first, other = (processor.process(draw(size, step)) for processor in both)
        assert np.array_equal(first, other)
        for processor in both:
            processor.extend([int(first.argmax())])


def test_an_end_that_is_too_far_is_not_begun(folder: Path) -> None:
    """A limit that no answer can keep shapes nothing, and an end is found only within `most`."""
    start = Grammar.start(json_grammar(PERSON), folder, [EOS])
    way = find_end(start, 200)
    assert way is not None
    assert way[-1] == EOS
    assert find_end(start, len(way) - 1) is None
    assert start.count_allowed(way[:-1]) == len(way) - 1
