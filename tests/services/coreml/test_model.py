"""A converted package, executed as saved, says what mlx-lm says of the model it came from."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.decoding.sampler import Floats
from protocol.messages import Tokens
from services.coreml.model import ConvertedModel, Feed, causal, chain_feed
from services.sampling.candidates import Top
from tests.properties import examples
from tests.support.converted import BRANCHES, CHUNK, HEAD, SLOTS, converted_folder, converted_model
from tests.support.reference import reference

FAMILIES = ("llama", "llama3", "linear", "qwen2", "qwen3", "yarn", "quantized", "gemma3")
TEXT: Tokens = [int(t) for t in np.random.default_rng(1).integers(4, 280, 56)]
ROUNDING = 0.25
"""Most that float16 may move a logit of these models, whose logits reach 10."""


def fed(model: ConvertedModel, text: Tokens, calls: list[tuple[str, int]]) -> list[Top]:
    """The candidates after each token that went through a head."""
    state, tops, start = model.new_state(), [], 0
    for function, count in calls:
        chain = chain_feed(text[start : start + count], start, SLOTS)
        tops += model.run(function, chain, state)
        start += count
    return tops


def check_rows(tops: list[Top], rows: Floats, atol: float) -> None:
    """Every candidate's logit and the log-sum-exp are those of the reference's rows."""
    for top, row in zip(tops, rows, strict=True):
        np.testing.assert_allclose(top.logits[0], row[top.ids[0]], atol=atol)
        assert abs(top.totals[0] - np.logaddexp.reduce(row)) < atol


@pytest.mark.parametrize("family", FAMILIES)
def test_float16_package_decodes_as_mlx(family: str) -> None:
    """Prefill, tree and single steps in float16: the best token of mlx-lm, but for ties."""
    model = converted_model(converted_folder(family), "float16")
    calls = [("prefill", 16), ("prefill", 7), ("tree", 8), ("tree", 5), *[("decode", 1)] * 20]
    tops = fed(model, TEXT, calls)
    rows = reference(family).rows([TEXT])[0][23:]
    check_rows(tops, rows, ROUNDING)
    for top, row in zip(tops, rows, strict=True):
        assert row[top.ids[0, 0]] > row.max() - ROUNDING


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_the_graph_is_exact_but_for_rounding(family: str) -> None:
    """In float32 arithmetic only the weights' and tables' own rounding remains."""
    tops = fed(converted_model(converted_folder(family)), TEXT, [("decode", 1)] * 24)
    check_rows(tops, reference(family).rows([TEXT])[0][:24], 0.08)


VARIANTS = {
    "one-hot state": {"state_write": "onehot"},
    "parts": {"layers_per_part": 2},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_say_the_same(variant: str) -> None:
    """Another way of writing the state, or several packages, change no value."""
    calls = [("prefill", 16), ("tree", 8), ("decode", 1), ("tree", 3)]
    plain = fed(converted_model(converted_folder("llama")), TEXT, calls)
    options = tuple(VARIANTS[variant].items())
    varied = fed(converted_model(converted_folder("llama", options=options)), TEXT, calls)
    for a, b in zip(plain, varied, strict=True):
        np.testing.assert_allclose(a.logits, b.logits, atol=1e-4)
        np.testing.assert_array_equal(a.ids, b.ids)


def test_a_trimmed_head_speaks_target_ids() -> None:
    """Column i of a trimmed head is the i-th id of `draft_head.json`."""
    model = converted_model(converted_folder("llama", trimmed=True))
    tops = fed(model, TEXT, [("tree", 8)])
    for top, row in zip(tops, reference("llama").rows([TEXT])[0], strict=False):
        best = max(HEAD, key=lambda token: row[token])
        assert best == top.ids[0, 0]
        np.testing.assert_allclose(top.logits[0], row[top.ids[0]], atol=0.08)
        assert abs(top.totals[0] - np.logaddexp.reduce(row[HEAD])) < 0.08


# ---------------------------------------------------------------- trees


@st.composite
def trees(draw: Any) -> tuple[list[int], list[list[int]]]:
    """(chain after the prompt, per depth the parent of each node: the chain first, then nodes)."""
    chain = draw(st.lists(st.integers(4, 280), min_size=1, max_size=4))
    widths = draw(st.lists(st.integers(1, BRANCHES), min_size=1, max_size=3))
    levels, known = [], len(chain)
    for width in widths:
        levels.append([draw(st.integers(0, known - 1)) for _ in range(width)])
        known += width
    return chain, levels


@examples(12)
@given(tree=trees(), seed=st.integers(0, 1000))
def test_any_tree_equals_decoding_one_by_one(
    tree: tuple[list[int], list[list[int]]], seed: int
) -> None:
    """Nodes may hang anywhere: each sees its ancestors alone, whatever stands beside it."""
    chain, levels = tree
    model = converted_model(converted_folder("llama"))
    state, prompt = model.new_state(), TEXT[:5]
    model.run("tree", chain_feed(prompt, 0, SLOTS), state)
    tops = model.run("tree", chain_feed(chain, len(prompt), SLOTS), state)
    rng = np.random.default_rng(seed)
    paths = [list(range(len(prompt) + i + 1)) for i in range(len(chain))]
    texts = [prompt + chain[: i + 1] for i in range(len(chain))]
    for depth, parents in enumerate(levels):
        slot = 16 + depth * BRANCHES
        tokens = [int(t) for t in rng.integers(4, 280, len(parents))]
        cache = np.zeros((len(parents), SLOTS), bool)
        for row, parent in enumerate(parents):
            cache[row, paths[parent]] = True
        positions = [len(texts[parent]) for parent in parents]
        feed = Feed(tokens, positions, slot, cache, np.eye(len(parents), dtype=bool))
        tops += model.run("tree", feed, state)
        for row, parent in enumerate(parents):
            paths.append([*paths[parent], slot + row])
            texts.append([*texts[parent], tokens[row]])
    leaves = len(levels[-1])
    for top, text in zip(tops[-leaves:], texts[-leaves:], strict=True):
        alone = fed(model, text, [("decode", 1)] * len(text))[-1]
        np.testing.assert_allclose(top.logits, alone.logits, atol=1e-3)
        np.testing.assert_allclose(top.totals, alone.totals, atol=1e-3)
    rows = [row[-1] for row in reference("llama").rows(texts)]
    check_rows(tops, np.array(rows), ROUNDING)


def test_a_call_changes_its_own_slots_only() -> None:
    """What is written lies in [slot, slot + rows of the function)."""
    model = converted_model(converted_folder("llama"))
    state = model.new_state()
    model.run("prefill", chain_feed(TEXT[:CHUNK], 0, SLOTS), state)
    before = {name: array.copy() for name, array in state[0].items()}
    model.run("tree", chain_feed(TEXT[CHUNK : CHUNK + 3], CHUNK, SLOTS), state)
    for name, array in state[0].items():
        changed = np.flatnonzero((array != before[name]).any(axis=(0, 1, 3)))
        assert set(changed) <= set(range(CHUNK, CHUNK + BRANCHES))
        assert {CHUNK, CHUNK + 1, CHUNK + 2} <= set(changed)


def test_stateless_prefill_returns_what_the_state_would_hold() -> None:
    """Keys and values of the stateless function, fed with its own, are those of the state."""
    model = converted_model(converted_folder("llama", options=(("layers_per_part", 2),)))
    state = model.new_state()
    past = [(s["keys"] * 0, s["values"] * 0) for s in model.new_state()]
    for start in range(0, 2 * CHUNK, CHUNK):
        feed = chain_feed(TEXT[start : start + CHUNK], start, SLOTS)
        model.run("prefill", feed, state)
        for (keys, values), (new_keys, new_values) in zip(
            past, model.keys_values("prefill_kv", feed, past), strict=True
        ):
            keys[:, :, start : start + CHUNK] = new_keys
            values[:, :, start : start + CHUNK] = new_values
    for held, (keys, values) in zip(state, past, strict=True):
        np.testing.assert_array_equal(held["keys"], keys)
        np.testing.assert_array_equal(held["values"], values)


@pytest.mark.parametrize(
    ("function", "feed", "said"),
    [
        ("decode", chain_feed([5, 6], 0, SLOTS), "1 to 1 tokens"),
        ("tree", chain_feed([5], SLOTS - 2, SLOTS), "slot 126 is too high"),
    ],
)
def test_calls_that_do_not_fit_are_refused(function: str, feed: Feed, said: str) -> None:
    """A write beyond the state would be silent corruption on some devices."""
    model = converted_model(converted_folder("llama"))
    with pytest.raises(ValueError, match=said):
        model.run(function, feed, model.new_state())


def test_a_chain_sees_what_came_before() -> None:
    """The mask of a chain is lower triangular."""
    assert causal(3).tolist() == [[True, False, False], [True, True, False], [True] * 3]
