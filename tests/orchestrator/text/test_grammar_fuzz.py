"""Schemas of any content: a grammar is usable or is refused in a sentence, and nothing else."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.text.grammar_cost import find_grammar_error
from protocol.decoding.grammar import Grammar, json_grammar
from protocol.errors import ProtocolError
from tests.support.reference import tiny_folder
from tests.support.tiny_models import EOS

FOLDER = tiny_folder("llama")
WORDS = st.sampled_from(["a", "b", "é", "\u0000", "$ref", "properties", "\U0001f600", ""])
PATTERNS = st.lists(
    st.sampled_from(
        ["a", ".", "[^x]", "(", ")", "|", "*", "+", "?", "{2,9}", "^", "$", "\\d", "\\", "(?="]
    ),
    max_size=8,
).map("".join)
NUMBERS = st.one_of(st.integers(-9, 99), st.floats(allow_nan=False, allow_infinity=False))
SMALL = st.integers(-2, 40)

leaves = st.one_of(
    st.booleans(),
    st.none(),
    st.just({}),
    st.just({"$ref": "#"}),
    st.just({"$ref": "#/$defs/x"}),
    st.fixed_dictionaries({"type": st.sampled_from(["string", "integer", "number", "null", "x"])}),
    st.fixed_dictionaries(
        {"type": st.just("string")},
        optional={"pattern": PATTERNS, "minLength": SMALL, "maxLength": SMALL, "format": WORDS},
    ),
    st.fixed_dictionaries(
        {"type": st.sampled_from(["integer", "number"])},
        optional={"minimum": NUMBERS, "maximum": NUMBERS, "multipleOf": SMALL},
    ),
    st.fixed_dictionaries({"enum": st.lists(st.one_of(WORDS, NUMBERS, st.none()), max_size=4)}),
    st.fixed_dictionaries({"const": st.one_of(WORDS, NUMBERS)}),
)
schemas: st.SearchStrategy[Any] = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.fixed_dictionaries(
            {"type": st.just("object")},
            optional={
                "properties": st.dictionaries(WORDS, inner, max_size=3),
                "required": st.lists(WORDS, max_size=2),
                "additionalProperties": inner,
            },
        ),
        st.fixed_dictionaries(
            {"type": st.just("array")},
            optional={"items": inner, "minItems": SMALL, "maxItems": SMALL},
        ),
        st.dictionaries(
            st.sampled_from(["allOf", "anyOf", "oneOf"]), st.lists(inner, max_size=3), max_size=2
        ),
        st.fixed_dictionaries({"$defs": st.dictionaries(st.just("x"), inner), "$ref": WORDS}),
    ),
    max_leaves=8,
)


@given(schema=schemas, steps=st.lists(st.integers(0, 10**6), max_size=12))
@pytest.mark.filterwarnings("ignore")
def test_any_schema_is_usable_or_refused(schema: Any, steps: list[int]) -> None:
    """What is found usable can be followed step by step, or ends its request alone."""
    grammar = json_grammar(schema if isinstance(schema, dict) else {"const": schema})
    if reason := find_grammar_error(grammar, FOLDER):
        assert reason.startswith("the ")
        return
    state = Grammar.start(grammar, FOLDER, [EOS])
    for step in steps:
        try:
            allowed = state.compute_mask().nonzero()[0]
            if not allowed.size or not state.advance(int(allowed[step % allowed.size])):
                return
        except ProtocolError as error:
            assert "costs too much" in str(error)  # noqa: PT017  # most examples raise nothing
            return
