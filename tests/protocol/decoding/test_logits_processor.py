"""What a request does to logits, position by position, forwards and back."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace

from protocol.decoding.grammar import Grammar, check_grammar, json_grammar
from protocol.decoding.logits_processor import LogitsProcessor, process_rows
from protocol.errors import UsageError
from protocol.messages import MAX_GRAMMAR_CHARACTERS, LogitsOptions, Tokens
from tests.support.reference import tiny_folder
from tests.support.tiny_models import EOS, vocabulary_size

NOWHERE = Path("/nowhere")
SIZE = 12
FULL = LogitsOptions(
    logit_bias=((2, 1.5), (3, -4.0)),
    repetition_penalty=1.7,
    presence_penalty=0.4,
    frequency_penalty=0.3,
    answer_from=3,
)
tokens = st.lists(st.integers(0, SIZE - 1), max_size=12)


def by_definition(row: np.ndarray, shape: LogitsOptions, history: Tokens) -> np.ndarray:
    """The formulas, one token at a time."""
    answer = history[shape.answer_from :]
    out = []
    for token, logit in enumerate(row.tolist()):
        value = logit + dict(shape.logit_bias).get(token, 0.0)
        if token in history:
            factor = shape.repetition_penalty
            value = value / factor if value > 0 else value * factor
        if token in answer:
            value -= shape.presence_penalty + shape.frequency_penalty * answer.count(token)
        out.append(value)
    return np.array(out)


def row(seed: int, size: int = SIZE) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=size).astype(np.float32)


@given(history=tokens)
def test_formulas(history: Tokens) -> None:
    """Bias, then repetition over everything, then presence and frequency over the answer."""
    shaped = LogitsProcessor(FULL, NOWHERE, history).process(row(1))
    assert np.allclose(shaped, by_definition(row(1), FULL, history), atol=1e-5)


@given(history=tokens, more=tokens, keep=st.integers(0, 24))
def test_there_and_back(history: Tokens, more: Tokens, keep: int) -> None:
    """Extending, rewinding and branching leave what a fresh start would have."""
    processor = LogitsProcessor(FULL, NOWHERE, history)
    processor.extend(more)
    kept = (history + more)[: min(keep, len(history + more))]
    branch = processor.branch(len(kept))
    expected = by_definition(row(2), FULL, kept)
    assert np.allclose(branch.process(row(2)), expected, atol=1e-5)
    processor.rewind(len(kept))
    assert np.allclose(processor.process(row(2)), expected, atol=1e-5)
    assert len(processor) == len(kept)


def test_a_trimmed_head_is_shaped_by_what_its_columns_mean() -> None:
    """Column i of a trimmed head gets what its token gets in a full one."""
    ids = np.array([7, 2, 5, 0])
    full = LogitsProcessor(FULL, NOWHERE, [5, 6, 2, 7, 7]).process(row(3))
    trimmed = LogitsProcessor(FULL, NOWHERE, [5, 6, 2, 7, 7], ids).process(row(3)[ids])
    assert np.allclose(trimmed, full[ids])


# ---------------------------------------------------------------- grammars

FOLDER = tiny_folder("llama")
CHOICE = LogitsOptions(grammar='start: "ab" | "ac"', answer_from=1, stop_ids=(EOS,))


def token(character: str) -> int:
    """The byte-level token of one character."""
    import json  # noqa: PLC0415

    vocabulary = json.loads((FOLDER / "tokenizer.json").read_text())["model"]["vocab"]
    return int(vocabulary[character])


def possible(processor: LogitsProcessor) -> set[int]:
    shaped = processor.process(np.zeros(vocabulary_size(), dtype=np.float32))
    return {int(t) for t in np.flatnonzero(np.isfinite(shaped))}


def test_a_grammar_leaves_what_may_follow() -> None:
    """After the prompt its beginnings, at its end only the stop token."""
    a, b, c = token("a"), token("b"), token("c")
    processor = LogitsProcessor(CHOICE, FOLDER, [9])
    assert possible(processor) == {a}
    processor.extend([a])
    assert possible(processor) == {b, c}
    processor.extend([c])
    assert possible(processor) == {EOS}
    processor.rewind(2)
    assert possible(processor) == {b, c}


def test_what_a_grammar_forbids_ends_its_say() -> None:
    """After a draft token that cannot be, rows stay as they are: nobody will look at them."""
    a, b = token("a"), token("b")
    processor = LogitsProcessor(CHOICE, FOLDER, [9])
    rows = np.zeros((4, vocabulary_size()), dtype=np.float32)
    shaped = process_rows(processor, [a, a, b, b], rows)
    assert [int(np.isfinite(r).sum()) for r in shaped] == [2, *[vocabulary_size()] * 3]
    processor.rewind(2)
    assert possible(processor) == {b, token("c")}


@given(
    known=st.integers(1, 5),
    said=st.sampled_from(["", "a", "b", "ab", "ac", "abc"]),
    draft=st.text("abcx", max_size=4),
    banned=st.sampled_from("bcx"),
)
@example(known=1, said="a", draft="b", banned="b")
@example(known=5, said="b", draft="bx", banned="x")
def test_what_may_follow_is_what_rows_would_leave(
    known: int, said: str, draft: str, banned: str
) -> None:
    """A draft is possible up to its first token that is banned, or that a row would not leave.

    The processor knows a prompt and an answer in part; the rest of them is sure.
    """
    shape = replace(CHOICE, answer_from=3, logit_bias=((token(banned), -100.0),))
    history = [9] * 3 + [token(c) for c in said]
    processor = LogitsProcessor(shape, FOLDER, history[:known])
    step = LogitsProcessor(replace(CHOICE, answer_from=3), FOLDER, history)
    expected = 0
    for one in [token(c) for c in draft] if said not in ("b", "abc") else []:
        if one == token(banned) or one not in possible(step):
            break
        step.extend([one])
        expected += 1
    strayed = known > 3 and said == "b"
    expected = (draft + banned).index(banned) if strayed else expected  # only the bias has a say
    assert expected == processor.count_allowed(history[known:], [token(c) for c in draft])
    assert len(processor) == len(history[:known])


def test_a_token_of_no_vocabulary_breaks_no_grammar() -> None:
    """It ends what is possible, and the grammar goes on."""
    processor = LogitsProcessor(CHOICE, FOLDER, [9])
    assert processor.count_allowed([], [token("a"), 2**30, token("b")]) == 1
    assert possible(processor) == {token("a")}


def test_a_head_without_an_allowed_token_is_left_alone() -> None:
    """A trimmed head that cannot say what the grammar wants drafts anything."""
    ids = np.array([token("x"), token("y")])
    shaped = LogitsProcessor(CHOICE, FOLDER, [9], ids).process(np.zeros(2, dtype=np.float32))
    assert np.isfinite(shaped).all()
    ids = np.array([token("x"), token("a")])
    shaped = LogitsProcessor(CHOICE, FOLDER, [9], ids).process(np.zeros(2, dtype=np.float32))
    assert np.isfinite(shaped).tolist() == [False, True]


def test_padding_of_the_head_is_forbidden() -> None:
    """Columns that stand for no token are never chosen."""
    shaped = LogitsProcessor(CHOICE, FOLDER, [9]).process(
        np.ones(vocabulary_size() + 8, dtype=np.float32)
    )
    assert not np.isfinite(shaped[vocabulary_size() :]).any()


@pytest.mark.parametrize("text", ['start: %json {"type": "colour"}', "nonsense"])
def test_nonsense_is_no_grammar(text: str) -> None:
    """The library's own reason is in the sentence."""
    with pytest.raises(UsageError, match="grammar or schema"):
        check_grammar(text)


def test_a_grammar_has_a_largest_size() -> None:
    """Beyond it, the refusal tells the limit; up to it, size is no reason."""
    most = MAX_GRAMMAR_CHARACTERS
    grammar = 'start: "a" //'
    check_grammar(grammar.ljust(most, "x"))
    with pytest.raises(UsageError, match=f"{most + 1} bytes; at most {most}"):
        check_grammar(grammar.ljust(most + 1, "x"))


def test_schemas_are_grammars() -> None:
    """A schema that the library knows is fine."""
    check_grammar(json_grammar({"type": "object", "properties": {"n": {"type": "integer"}}}))
    assert Grammar.start(json_grammar({"type": "boolean"}), FOLDER, [EOS]).compute_mask().any()
