"""The coreml backend drafts what fresh drafting from the same prefix would draft."""

import pytest

pytest.importorskip("coremltools")

from protocol.decoding.token_tree import read_tree
from protocol.errors import ModelError, ProtocolError
from protocol.messages import LogitsOptions, Sampling, Tokens
from services.drafter.backends.base import Outcome, TreeLayer
from services.drafter.backends.coreml import Call, CoremlBackend, calls_for
from services.drafter.backends.mlx import MlxBackend
from tests.support.converted import (
    BRANCHES,
    SLOTS,
    converted_folder,
    converted_model,
    source_folder,
)
from tests.support.reference import SAMPLINGS, drafts

PROMPT: Tokens = [0, 2, 97, 41, 250, 33, 8, 141, 77, 19, 203, 64]


def backend_of(family: str = "llama", *, trimmed: bool = False) -> CoremlBackend:
    return CoremlBackend(converted_model(converted_folder(family, trimmed=trimmed)))


def opened(backend: CoremlBackend, tokens: Tokens, sampling: Sampling | None = None) -> int:
    for _ in backend.open(1, tokens, sampling or Sampling()):
        pass
    return 1


def drafted(backend: CoremlBackend, pending: int, count: int) -> Tokens:
    return [draft.token for draft in drafts(backend.draft(1, pending, count))]


def fresh_drafts(prefix: Tokens, count: int, sampling: Sampling) -> Tokens:
    """Drafts after `prefix` from a sequence that knows nothing else."""
    backend = backend_of()
    opened(backend, prefix[:-1], sampling)
    return drafted(backend, prefix[-1], count)


def check_layers(
    layers: list[TreeLayer], prefix: Tokens, chain: Tokens, sampling: Sampling
) -> None:
    """Every branch drafts as if its prefix were all there is."""
    for index, (accepted, bonus) in enumerate(layers[0].outcomes):
        whole = [*prefix, *chain[: accepted + 1], bonus]
        drafted = [layer.tokens[index] for layer in layers]
        assert fresh_drafts(whole, len(layers), sampling) == drafted


@pytest.mark.parametrize("name", SAMPLINGS)
def test_rounds_draft_as_from_scratch(name: str) -> None:
    """Prefill, a hit, a miss, a rewind: each round's branches equal fresh drafting."""
    sampling = SAMPLINGS[name]
    backend = backend_of()
    opened(backend, PROMPT, sampling)
    committed, chain = list(PROMPT), [40]
    layers = list(backend.prepare(1, read_tree(chain), [3], depth=3))
    check_layers(layers, committed, chain, sampling)
    # A hit: the next chain is a branch that was drafted.
    bonus = layers[0].outcomes[1].bonus
    backend.commit(1, len(committed), chain)
    committed += chain
    chain = [bonus, *(layer.tokens[1] for layer in layers)]
    layers = list(backend.prepare(1, read_tree(chain), [2, 1, 1, 2], depth=2))
    check_layers(layers, committed, chain, sampling)
    # A miss after two accepted tokens.
    backend.commit(1, len(committed), chain[:3])
    committed += chain[:3]
    layers = list(backend.prepare(1, read_tree([77]), [2], depth=2))
    check_layers(layers, committed, [77], sampling)
    # The orchestrator may rewind what it had called committed.
    backend.commit(1, 10, [5, 6])
    assert fresh_drafts([*committed[:10], 5, 6, 9], 3, sampling) == drafted(backend, 9, 3)


def test_outcomes_are_the_best_bonuses_without_the_rejected() -> None:
    """Of each row the best tokens; never the drafted one, which would have been accepted."""
    backend = backend_of()
    opened(backend, PROMPT)
    first = next(backend.draft(1, 40, 1)).tokens[0]
    [layer] = backend.prepare(1, read_tree([40, first]), [2, 3], depth=1)
    assert [outcome.accepted for outcome in layer.outcomes] == [0, 0, 1, 1, 1]
    assert Outcome(0, first) not in layer.outcomes


def test_more_branches_than_a_call_takes() -> None:
    """A depth of more branches is several calls; none sees another's tokens."""
    backend = backend_of()
    opened(backend, PROMPT)
    layers = list(backend.prepare(1, read_tree([40]), [BRANCHES + 3], depth=2))
    assert len(layers[0].outcomes) == BRANCHES + 3
    check_layers(layers, PROMPT, [40], Sampling())


def test_nothing_is_written_to_committed_slots() -> None:
    """A round changes no row of the state that belongs to a committed token."""
    backend = backend_of()
    opened(backend, PROMPT)
    list(backend.prepare(1, read_tree([40, 41]), [2, 2], depth=2))
    backend.commit(1, len(PROMPT), [40, 41])
    state = backend._sequences[1].state[0]
    before = {name: array[:, :, : len(PROMPT) + 2].copy() for name, array in state.items()}
    list(backend.prepare(1, read_tree([50, 51, 52]), [3, 3, 3], depth=3))
    list(backend.draft(1, 50, 4))
    for name, array in state.items():
        assert (before[name] == array[:, :, : len(PROMPT) + 2]).all()


def test_a_sequence_opened_again_knows_nothing_of_the_first() -> None:
    """A reset is a fresh state."""
    backend = backend_of()
    opened(backend, [200] * 30)
    opened(backend, PROMPT)
    assert fresh_drafts([*PROMPT, 40], 4, Sampling()) == drafted(backend, 40, 4)


@pytest.mark.parametrize("length", [SLOTS - 12, SLOTS - 3, SLOTS, SLOTS + 40])
def test_a_full_state_ends_drafting_quietly(length: int) -> None:
    """Near the end of the state there are fewer drafts, beyond it none, and never an error."""
    backend = backend_of()
    text = [int(4 + 7 * i % 270) for i in range(length)]
    opened(backend, text)
    layers = list(backend.prepare(1, read_tree([40]), [3], depth=6))
    found = drafted(backend, 40, 6)
    assert len(layers) <= max(0, (SLOTS - length) // BRANCHES)
    assert len(found) == min(6, max(0, SLOTS - length))
    if found:
        assert fresh_drafts([*text, 40], len(found), Sampling()) == found


@pytest.mark.parametrize("trimmed", [False, True])
def test_mlx_backend_drafts_the_same(trimmed: bool) -> None:  # noqa: FBT001  # pytest's way
    """Both neural backends over the same model: same outcomes, drafts and confidences."""
    converted = backend_of(trimmed=trimmed)
    native = MlxBackend(source_folder("llama", trimmed=trimmed), 512, "cpu")
    found = []
    for backend in (converted, native):
        for _ in backend.open(1, PROMPT, Sampling()):
            pass
        found.append(list(backend.prepare(1, read_tree([40, 41]), [2, 2], depth=3)))
    for ours, theirs in zip(*found, strict=True):
        assert theirs.outcomes == ours.outcomes
        assert theirs.tokens == ours.tokens
        assert pytest.approx(theirs.confidences, abs=0.02) == ours.confidences


SHAPE = LogitsOptions(
    logit_bias=((41, 2.0), (212, -9.0)), repetition_penalty=1.4, presence_penalty=1.0,
    frequency_penalty=0.5, answer_from=8,
)  # fmt: skip


def test_shaped_drafts_are_those_of_the_mlx_backend() -> None:
    """Bias and penalties move drafts alike in both, along the trunk, branches and rewinds."""
    sampling = Sampling(logits_options=SHAPE)
    found = []
    for backend in (backend_of(), MlxBackend(source_folder("llama"), 512, "cpu")):
        for _ in backend.open(1, PROMPT, sampling):
            pass
        # Of 204, rejected here, no penalty may be left: it is among the drafts after the rewind.
        layers = list(backend.prepare(1, read_tree([40, 204]), [2, 2], depth=3))
        backend.commit(1, len(PROMPT), [40, 99])
        tail = [draft.token for draft in drafts(backend.draft(1, 7, 5))]
        found.append(([layer.tokens for layer in layers if layer is not None], tail))
    assert found[1] == found[0]
    unshaped = backend_of()
    opened(unshaped, [*PROMPT, 40, 99])
    assert drafted(unshaped, 7, 5) != found[0][1]


def test_unknown_sequences_and_impossible_rewinds_are_refused() -> None:
    """Both are errors of the caller, said with what is wrong."""
    backend = backend_of()
    with pytest.raises(ProtocolError, match="sequence 9 is not open"):
        list(backend.draft(9, 1, 1))
    opened(backend, PROMPT)
    with pytest.raises(ProtocolError, match="cannot rewind 12 tokens to 13"):
        backend.commit(1, 13, [])
    backend.close(1)
    backend.close(1)


def test_a_folder_that_is_not_converted_is_refused() -> None:
    """The message names what makes one."""
    with pytest.raises(ModelError, match="ssd convert"):
        converted_model(source_folder("llama"))


def test_calls_prefer_the_large_functions() -> None:
    """Prompts in chunks, the rest in trees, near the end of the state token by token."""

    def calls(start: int, stop: int, rows: int) -> list[Call]:
        return calls_for(start, stop, rows, chunk=16, branches=8, slots=64)

    prefill, tree = Call("prefill", 16), Call("tree", 8)
    assert [prefill, prefill, tree] == calls(0, 40, 0)
    assert [prefill, tree, Call("tree", 2)] == calls(0, 26, 3)
    assert [Call("decode", 1)] == calls(7, 8, 1)
    assert [Call("prefill", 12), Call("tree", 3)] == calls(5, 20, 3)
    assert [Call("tree", 3), Call("decode", 1)] == calls(56, 59, 1)[:1] + calls(60, 61, 1)
    assert [Call("decode", 1)] * 4 == calls(60, 64, 4)
    assert calls(9, 9, 0) == []
