"""Branches of one launch: the drafts of the model's own passes, or not used.

The kernel itself runs in tests/services/kernels/cuda/test_persistent.py; here the model takes its
place, and writes keys and values as it does.
"""

import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any, cast
from unittest.mock import patch

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import Phase, given
from hypothesis import strategies as st
from mlx_lm.models.cache import KVCache

from orchestrator.sequence.limits import Limits
from protocol.decoding.sampler import has_filter
from protocol.decoding.token_tree import read_tree
from protocol.errors import NotNumbers
from protocol.messages import Sampling, Tokens
from services.drafter.backends import mlx_persistent
from services.drafter.backends.base import RoundOptions, TreeLayer
from services.drafter.backends.mlx import MlxBackend
from services.drafter.backends.mlx_persistent import PersistentDrafts
from services.kernels.cpu.library import view
from services.kernels.cuda import kv_rows
from services.kernels.cuda.persistent import (
    MOST_DEPTHS,
    MOST_ROWS,
    MOST_RULES,
    NAMED,
    DraftCall,
    Named,
    PersistentKernel,
    Unavailable,
)
from services.kernels.cuda.sampling.rules import write_rules
from services.mlx.loader import load
from services.runtime.preparation import run_all
from services.sampling import candidates
from services.sampling.candidates import SAMPLED_WIDTH, Top
from services.verifier.verifier import Verifier
from tests.properties import examples
from tests.services.drafter.backends.test_mlx import PROMPT, SCRIPT, Line, Round, Setup, rounds
from tests.services.drafter.backends.test_mlx_ahead import as_on_a_gpu
from tests.services.kernels.cuda.host import move_rows
from tests.support.lockstep import Lockstep
from tests.support.reference import SAMPLINGS, Reference, drafts, plain, said, tiny_folder

pytestmark = pytest.mark.usefixtures("all_candidates", "rows_moved_here")


@pytest.fixture(scope="module")
def rows_moved_here() -> Iterator[None]:
    """Rows are moved in place, too, without the kernel for it."""
    with patch.object(kv_rows, "move", move_rows):
        yield


RULES: dict[bytes, Callable[..., Top]] = {}
"""Rules that were written -> the choices that they make."""


@pytest.fixture(scope="module", autouse=True)
def rules_read_back() -> Iterator[None]:
    def write(positions: range, sampling: Sampling) -> Any:
        rules = write_rules(positions, sampling)
        for rule, position in zip(rules, positions, strict=True):
            RULES[rule.tobytes()] = partial(choose, position=position, sampling=sampling)
        return rules

    with patch.object(mlx_persistent, "write_rules", write):
        yield


def choose(logits: mx.array, ids: mx.array, position: int, sampling: Sampling) -> Top:
    """The choices after a row, where every token is a candidate unless there are filters."""
    rows = np.array(logits.astype(mx.float32))
    width = SAMPLED_WIDTH if has_filter(sampling) else rows.shape[-1]
    top = candidates.best_of(rows, width, np.array(ids))
    return candidates.perturb(top, [position], sampling)


class ModelKernel:
    """Drafts as the kernel does, by the model's own passes."""

    def __init__(self, model: Any, ids: mx.array) -> None:
        self._model, self._ids = model, ids
        self.calls: list[DraftCall] = []
        self.most = MOST_DEPTHS
        """Depths after which the device does not answer."""
        self.further = 1
        """Depths that an interrupted draft has found and that were not read."""
        self.given_up = 0
        """Depths of interrupted drafts that were never done."""

    def start(self, buffers: Sequence[Any], call: DraftCall, rules: Any, kind: int) -> "ModelDraft":
        del kind
        assert len(call.trunk + call.roots) <= MOST_ROWS
        assert 0 < call.depths <= MOST_DEPTHS
        assert len(rules) == call.positions <= MOST_RULES
        assert call.slots <= buffers[0][0].shape[2]
        self.calls.append(call)
        mx.eval(buffers)
        trunk = self._caches(buffers, call.first)
        if call.trunk:
            self._feed(call.trunk, trunk)
        self._write(buffers, trunk, call.first, call.first)
        roots = call.roots or call.trunk
        found = [
            self._branch(buffers, call, at, root, rules[fork + 2 - call.origin :])
            for at, (root, fork) in enumerate(zip(roots, call.forks, strict=True))
        ]
        return ModelDraft(self, [list(depth) for depth in zip(*found, strict=True)])

    def _branch(self, buffers: Any, call: DraftCall, at: int, root: int, rules: Any) -> list[Named]:
        fork, found, following = call.forks[at], [], [root]
        caches = self._caches(buffers, fork + 1)
        for rule in rules[: call.depths]:
            logits = self._feed(following, caches)
            top = RULES[rule.tobytes()](logits, self._ids)
            following = top.ids[0, :1].tolist()
            found.append(Named(top.ids[0, :NAMED].tolist(), top.confidences(0, NAMED)))
        if call.roots:
            start, count = call.first + len(call.trunk), len(call.roots)
            step = call.slots - start
            for depth in range(call.depths):
                to = start + at + depth * step // call.depths
                self._write(buffers, caches, fork + 1 + depth, to, count=1)
            assert count <= step // call.depths
        return found

    def _feed(self, tokens: Tokens, caches: list[KVCache]) -> mx.array:
        logits = self._model(mx.array(tokens)[None], cache=caches)[0, -1:, : self._ids.size]
        mx.eval(logits)
        return logits

    @staticmethod
    def _caches(buffers: Sequence[Any], length: int) -> list[KVCache]:
        caches = [KVCache() for _ in buffers]
        for (keys, values), cache_ in zip(buffers, caches, strict=True):
            cache_.update_and_fetch(*(mx.array(view(one)[:, :, :length]) for one in (keys, values)))
        return caches

    @staticmethod
    def _write(buffers: Any, caches: list[KVCache], first: int, to: int, count: int = 0) -> None:
        for pair, cache_ in zip(buffers, caches, strict=True):
            end = first + count if count else cache_.offset
            for buffer, own in zip(pair, (cache_.keys, cache_.values), strict=True):
                view(buffer)[:, :, to : to + end - first] = np.array(own[:, :, first:end])


class ModelDraft:
    """What such a kernel has found."""

    def __init__(self, kernel: ModelKernel, found: list[list[Named]]) -> None:
        self._kernel, self._found = kernel, found
        self._seen = 0

    def read(self, depth: int, branches: int) -> list[Named]:
        if depth >= self._kernel.most:
            raise Unavailable("gone")
        assert len(self._found[depth]) == branches
        self._seen = max(self._seen, 1 + depth)
        return self._found[depth]

    def stop(self) -> int:
        """End the draft."""
        there = min(len(self._found), self._seen + self._kernel.further)
        self._kernel.given_up += len(self._found) - there
        return there


def equip(backend: MlxBackend) -> ModelKernel:
    """Let this backend draft by a kernel."""
    assert backend.ahead is not None
    kernel = ModelKernel(backend._model, backend.ahead.ids)
    backend.ahead.persistent = PersistentDrafts(cast("PersistentKernel", kernel))
    return kernel


@cache
def setup_of(family: str) -> tuple[Setup, ModelKernel]:
    setup = Setup(as_on_a_gpu(tiny_folder(family)), Reference(tiny_folder(family)))
    return setup, equip(setup.backend)


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_drafts_equal_fresh_drafting(family: str, sampling: Sampling) -> None:
    """Every branch and draft of many rounds in a row is that of a fresh start from its prefix."""
    setup, kernel = setup_of(family)
    kernel.calls.clear()
    line = Line(setup, sampling, only_likely=has_filter(sampling))
    for played in SCRIPT:
        line.play(played)
    assert line.outcomes_hit >= 6
    assert len(kernel.calls) >= 3
    assert any(len(call.roots) > 1 for call in kernel.calls)
    assert any(not call.roots for call in kernel.calls)
    setup.backend.close(line.number)


@examples(30, phases=(Phase.generate,))
@given(
    sampling=st.sampled_from(list(SAMPLINGS.values())),
    script=st.lists(rounds, min_size=1, max_size=8),
)
def test_random_rounds_equal_fresh_drafting(sampling: Sampling, script: list[Round]) -> None:
    """So are those of random fan-outs, depths, outcomes, interruptions and rewinds."""
    setup, _ = setup_of("llama")
    line = Line(setup, sampling, only_likely=True)
    for played in script:
        line.play(played)
    setup.backend.close(line.number)


@pytest.mark.parametrize("committed", [0, 7, 8, 40])
def test_any_number_of_missing_tokens(committed: int) -> None:
    """A few are fed with the pending one, many before it."""
    text = [5 + 3 * at for at in range(committed)]
    found = []
    for backend in (as_on_a_gpu(tiny_folder("llama")), as_on_a_gpu(tiny_folder("llama"))):
        kernel = equip(backend) if found else None
        list(backend.open(1, list(PROMPT), Sampling()))
        backend.commit(1, len(PROMPT), text)
        found.append([drafted.token for drafted in drafts(backend.draft(1, 99, 5))])
        if kernel is not None:
            fed = [len(call.trunk + call.roots) for call in kernel.calls]
            assert fed == [1 + committed if committed < 8 else 1]
    assert found[0] == found[1]


@pytest.mark.parametrize("length", [MOST_ROWS, MOST_ROWS + 1, 30])
def test_chains_of_any_length(length: int) -> None:
    """Outcomes of a long one, as of a lookup, are prepared for by the kernel alone."""
    tree = read_tree([(7 * at) % 200 for at in range(length)])
    fan_out = [0] * (length - 2) + [2, 3]
    found = []
    for backend in (as_on_a_gpu(tiny_folder("llama")), as_on_a_gpu(tiny_folder("llama"))):
        list(backend.open(1, list(PROMPT), Sampling()))
        if found:
            kernel = equip(backend)
            backend._runner.model = None
        layers = said(backend.prepare(1, tree, fan_out, 3))
        branches = zip(*(layer.tokens for layer in layers), strict=True)
        found.append(dict(zip(layers[0].outcomes, branches, strict=True)))
    assert found[0] == found[1]
    assert [len(call.trunk) for call in kernel.calls if not call.roots] == [
        min(MOST_ROWS, length - first) for first in range(0, length, MOST_ROWS)
    ]


Found = list[list[TreeLayer]]
GREEDY = Sampling()


def compare(play: Callable[[MlxBackend], Found], sampling: Sampling = GREEDY) -> ModelKernel:
    """Play this without the kernel and with it: the outcomes and drafts must be the same ones."""
    found = []
    for has_kernel in (False, True):
        backend = as_on_a_gpu(tiny_folder("llama"))
        kernel = equip(backend) if has_kernel else None
        list(backend.open(1, list(PROMPT), sampling))
        trees = play(backend)
        branches = [zip(*(layer.tokens for layer in layers), strict=True) for layers in trees]
        outcomes = [layers[0].outcomes or [None] for layers in trees]
        found.append(
            [set(zip(*pair, strict=True)) for pair in zip(outcomes, branches, strict=True)]
        )
    assert found[0] == found[1]
    assert kernel is not None
    return kernel


def test_a_draft_before_anything_was_prepared() -> None:
    """What may follow its last token is not known then."""

    def play(backend: MlxBackend) -> Found:
        drafted = said(backend.draft(1, 99, 3))
        tree = read_tree([99, *(layer.tokens[0] for layer in drafted)])
        return [drafted, said(backend.prepare(1, tree, [1, 1, 1, 3], 2))]

    assert [len(call.roots) for call in compare(play).calls] == [1, 0, 6]


def test_an_interrupted_draft_names_what_follows() -> None:
    """What it found by then is used, too, and what it would have found is not waited for."""

    def play(backend: MlxBackend) -> Found:
        growing = backend.prepare(1, read_tree([99]), [2], 6)
        first = [layer for layer in itertools.islice(growing, 2) if layer is not None]
        growing.close()
        tokens = [first[0].outcomes[0].bonus, *(layer.tokens[0] for layer in first)]
        backend.commit(1, len(PROMPT), [99])
        return [first, said(backend.prepare(1, read_tree(tokens), [2, 2, 2], 2))]

    kernel = compare(play)
    assert [len(call.roots) for call in kernel.calls] == [0, 2, 6]
    assert kernel.given_up == 4


def test_branches_of_another_text_are_forgotten() -> None:
    """The same tokens at the same place continue otherwise after others."""

    def play(backend: MlxBackend) -> Found:
        first = said(backend.prepare(1, read_tree([99]), [2], 3))
        tokens = [first[0].outcomes[0].bonus, *(layer.tokens[0] for layer in first[:2])]
        backend.commit(1, len(PROMPT) - 2, [9, 8, 7])
        return [first, said(backend.prepare(1, read_tree(tokens), [2, 2, 2], 2))]

    compare(play)


def test_trees_are_the_model_s_own() -> None:
    """They are forgotten once the kernel has overwritten their slots."""
    siblings, found = RoundOptions(siblings=2), []
    for backend in (as_on_a_gpu(tiny_folder("llama")), as_on_a_gpu(tiny_folder("llama"))):
        kernel = equip(backend) if found else None
        list(backend.open(1, list(PROMPT), Sampling()))
        first = said(backend.prepare(1, read_tree([99, 5]), [2, 2], 2, siblings))
        assert kernel is None or not kernel.calls
        said(backend.prepare(1, read_tree([99, 60, 61]), [3, 3, 3], 3))
        assert kernel is None or kernel.calls
        backend.commit(1, len(PROMPT), [99])
        path = [first[0].outcomes[0].bonus, first[0].tokens[0]]
        grown = said(backend.prepare(1, read_tree(path), [2, 2], 2, siblings))
        found.append([(layer.outcomes, layer.tokens, layer.parents) for layer in (*first, *grown)])
    assert found[0] == found[1]


def test_a_context_that_slides() -> None:
    """Positions count the omitted tokens, too."""
    options = RoundOptions(shift=5)
    sampling = Sampling(temperature=1.5, seed=3)
    assert compare(lambda backend: [said(backend.draft(1, 99, 4, options))], sampling).calls


def test_outcomes_far_from_each_other() -> None:
    """The farther they are, the shorter are the branches."""
    backend, length = as_on_a_gpu(tiny_folder("llama")), MOST_RULES - 6
    kernel = equip(backend)
    list(backend.open(1, list(PROMPT), Sampling()))
    tree, fan_out = read_tree([(7 * at) % 200 for at in range(length)]), [1] + [0] * (length - 1)
    fan_out[-1] = 1
    layers = said(backend.prepare(1, tree, fan_out, 12))
    assert len(layers) == kernel.calls[-1].depths == MOST_RULES - (length - 1)


def test_longer_chains_than_the_kernel_drafts() -> None:
    backend = as_on_a_gpu(tiny_folder("llama"))
    kernel = equip(backend)
    list(backend.open(1, list(PROMPT), Sampling()))
    assert len(drafts(backend.draft(1, 99, MOST_DEPTHS + 1))) == MOST_DEPTHS + 1
    assert not kernel.calls


def test_forks_keep_their_own_tokens() -> None:
    """Nothing is written into buffers that a cached prefix holds."""
    backend = as_on_a_gpu(tiny_folder("llama"))
    kernel = equip(backend)
    list(backend.open(1, list(PROMPT), Sampling()))
    fork = backend._sequences[1].store.fork(len(PROMPT))
    before = [np.array(array) for array in fork.arrays]
    said(backend.draft(1, 99, 4))
    assert kernel.calls
    for array, held in zip(fork.arrays, before, strict=True):
        assert np.array_equal(np.array(array), held)


def test_a_device_that_does_not_answer(caplog: pytest.LogCaptureFixture) -> None:
    """The draft ends there, and the next one is the model's own."""
    backend = as_on_a_gpu(tiny_folder("llama"))
    list(backend.open(1, list(PROMPT), Sampling()))
    expected = [drafted.token for drafted in drafts(backend.draft(1, 99, 4))]
    backend.close(1)
    kernel = equip(backend)
    kernel.most = 2
    list(backend.open(1, list(PROMPT), Sampling()))
    assert [drafted.token for drafted in drafts(backend.draft(1, 99, 4))] == expected[:2]
    assert "not used any more: gone" in caplog.text
    assert [drafted.token for drafted in drafts(backend.draft(1, 99, 4))] == expected
    assert len(kernel.calls) == 1


def test_a_device_that_cannot_be_asked(caplog: pytest.LogCaptureFixture) -> None:
    """What it would prepare or draft is the model's own."""
    backend = as_on_a_gpu(tiny_folder("llama"))
    kernel = equip(backend)
    list(backend.open(1, list(PROMPT), Sampling()))
    with patch.object(kernel, "start", side_effect=Unavailable("gone")):
        assert said(backend.prepare(1, read_tree([99, 5]), [1, 2], 3))
    assert "not used any more: gone" in caplog.text
    assert len(drafts(backend.draft(1, 99, 3))) == 3
    assert not kernel.calls


def test_two_sequences_take_turns() -> None:
    backends = as_on_a_gpu(tiny_folder("llama")), as_on_a_gpu(tiny_folder("llama"))
    kernel, found = equip(backends[1]), []
    for backend in backends:
        for number, depth in ((1, 3), (2, 5)):
            list(backend.open(number, [*PROMPT, number], Sampling()))
            said(backend.prepare(number, read_tree([99, number]), [1, 2], depth))
        grown = zip(
            backend.prepare(1, read_tree([99, 1]), [1, 2], 3),
            backend.prepare(2, read_tree([99, 2]), [2, 2], 3),
            strict=True,
        )
        found.append(
            [
                {*zip(tree.outcomes, tree.tokens, strict=True)}
                for pair in grown
                for tree in said(pair)
            ]
        )
    assert found[0] == found[1]
    assert kernel.calls


def test_broken_logits_are_an_error() -> None:
    backend = as_on_a_gpu(tiny_folder("llama"))
    equip(backend)
    list(backend.open(1, list(PROMPT), Sampling()))
    broken = patch.object(ModelDraft, "read", return_value=[Named([3], [float("nan")])])
    with broken, pytest.raises(NotNumbers):
        said(backend.draft(1, 99, 4))


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_a_target_answers_the_same_with_such_drafts(sampling: Sampling) -> None:
    """A model that drafts for itself is nearly always hit, and the answer is plain decoding's."""
    length, backend = 40, as_on_a_gpu(tiny_folder("llama"))
    kernel = equip(backend)
    kernel.further = 0
    line = Lockstep(
        Verifier(load(tiny_folder("llama")), 512),
        backend,
        list(PROMPT),
        Limits(length, frozenset(), 0),
        num_draft_tokens=3,
        sampling=sampling,
    )
    statistics = line.run()
    assert line.sequence.tokens[len(PROMPT) :] == plain("llama", PROMPT, length, sampling)
    assert statistics.rounds < length / 2
    # What was prepared names its own next tokens: only the first round's are looked for.
    assert sum(not call.roots for call in kernel.calls) == 1


# ---------------------------------------------------------------- what is not used


def trace(backend: MlxBackend, *, faster: bool = True, shift: int = 0) -> None:
    """Prepare it where the kernel is there, whose tokens are this far from the model's."""
    assert backend.ahead is not None

    def open_(model: Any, ids: mx.array) -> Any:
        return ModelKernel(model, (ids + shift) % ids.size)

    with (
        patch.object(mlx_persistent, "_open", open_),
        patch.object(mlx_persistent, "is_faster", lambda *_: faster),
    ):
        run_all(backend.try_drafts())


def test_a_right_and_fast_kernel_is_used() -> None:
    backend = as_on_a_gpu(tiny_folder("llama"))
    trace(backend)
    assert backend.ahead is not None
    assert backend.ahead.persistent is not None


def test_a_slow_kernel_is_not_used() -> None:
    backend = as_on_a_gpu(tiny_folder("llama"))
    trace(backend, faster=False)
    assert backend.ahead is not None
    assert backend.ahead.persistent is None


def test_a_wrong_kernel_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    backend = as_on_a_gpu(tiny_folder("llama"))
    trace(backend, shift=1)
    assert backend.ahead is not None
    assert backend.ahead.persistent is None
    assert "0 of 72 tokens are the usual ones" in caplog.text


def test_a_kernel_with_other_confidences_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    backend, read = as_on_a_gpu(tiny_folder("llama")), ModelDraft.read

    def read_surer(draft: ModelDraft, depth: int, branches: int) -> list[Named]:
        found = read(draft, depth, branches)
        return [Named(tokens, [share**0.5 for share in shares]) for tokens, shares in found]

    with patch.object(ModelDraft, "read", read_surer):
        trace(backend)
    assert backend.ahead is not None
    assert backend.ahead.persistent is None
    assert "from theirs: not used" in caplog.text


def test_a_model_without_kernels(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    backend = as_on_a_gpu(tiny_folder("llama"))
    run_all(backend.try_drafts())
    assert backend.ahead is not None
    assert backend.ahead.persistent is None
    assert "branches drafted in one launch: not used: its blocks have no kernels" in caplog.text
