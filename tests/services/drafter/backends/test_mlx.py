"""Every draft is what fresh drafting from its prefix would give, however it came about."""

import json
import shutil
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from itertools import count, islice
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.decoding.gumbel import gumbel
from protocol.decoding.sampler import Floats, filter_tokens, has_filter
from protocol.decoding.token_tree import read_tree
from protocol.decoding.vocabulary import read_vocabulary
from protocol.errors import ModelError, ProtocolError
from protocol.messages import Sampling, Tokens
from services.drafter.backends import mlx
from services.drafter.backends.base import MAX_DRAFT_TOKENS, DraftedToken, TreeLayer
from services.drafter.backends.mlx import MlxBackend
from services.kernels.register import KERNELS
from services.kv.prefix_cache import PrefixCache
from services.mlx.loader import compute_unit
from services.runtime.sequence_table import SequenceTable
from tests.properties import examples
from tests.support.families.layered import RECURRENT_DRAFTERS
from tests.support.reference import SAMPLINGS, Reference, drafts, said, tiny_folder
from tests.support.tiny_models import DRAFTERS, FAMILIES, RECURRENT, write_tiny_model

VOCABULARY = 288
CANDIDATES = 64
"""How many of the best tokens by logit a sampling drafter ranks by their noise."""
FILTERED = 64
"""The same where filters drop some of them, on any device."""
PROMPT = (0, 2, 97, 41, 250, 33, 8, 141, 77, 19, 203, 64)
NUMBERS = count(1)


# ---------------------------------------------------------------- the yardstick


@dataclass(frozen=True)
class Law:
    """What a draft model says after a prefix: the score of each token, and how likely the target
    is to choose it under the noise of the position."""

    scores: Floats
    """[vocabulary] what the drafter maximises; minus infinity for what it cannot draft."""
    probabilities: Floats

    @classmethod
    def of(cls, row: Floats, position: int, sampling: Sampling, ids: Tokens | None) -> "Law":
        """From the full head's logits; `ids` are the tokens of a trimmed head."""
        known = np.arange(VOCABULARY) if ids is None else np.array(ids)
        logits = np.full(VOCABULARY, -np.inf, np.float32)
        logits[known] = row[known]
        weights = np.exp(logits - logits.max())
        if sampling.temperature == 0.0:
            return cls(logits, weights / weights.sum())
        few = FILTERED if has_filter(sampling) else CANDIDATES
        near = known[np.argsort(-logits[known])][:few]
        noise = gumbel(np, sampling.seed, [position], near.astype(np.uint32)[None])[0]
        scores = np.full(VOCABULARY, -np.inf, np.float32)
        scores[near] = logits[near] / np.float32(sampling.temperature) + noise
        if has_filter(sampling):
            dropped = near[filter_tokens(logits[near], sampling).size :]
            scores[dropped] -= np.float32(1e4)
        weights[near] = np.exp(scores[near] * np.float32(sampling.temperature) - logits.max())
        return cls(scores, weights / weights.sum())

    def check_best(self, tokens: Tokens, *, without: int | None = None) -> None:
        """These are the best tokens, in order; equal scores are told apart by rounding only."""
        scores = self.scores.copy()
        if without is not None:
            assert without not in tokens
            scores[without] = -np.inf
        assert len(set(tokens)) == len(tokens)
        best = np.sort(scores)[::-1][: len(tokens)]
        np.testing.assert_allclose(scores[tokens], best, atol=1e-3)

    def check_drafted(self, drafted: DraftedToken) -> None:
        """This is the best token, with its probability."""
        self.check_best([drafted.token])
        assert abs(drafted.confidence - self.probabilities[drafted.token]) < 1e-4


@dataclass
class Setup:
    """A backend, and the draft model under mlx-lm."""

    backend: MlxBackend
    reference: Reference
    ids: Tokens | None = None

    def distributions(self, sequences: list[Tokens], sampling: Sampling) -> list[list[Law]]:
        """Per sequence the distribution after each of its tokens, computed from scratch."""
        return [
            [Law.of(row, at + 1, sampling, self.ids) for at, row in enumerate(rows)]
            for rows in self.reference.rows(sequences)
        ]


@cache
def setup_of(family: str) -> Setup:
    folder = tiny_folder(family)
    return Setup(MlxBackend(folder, prefill_step_size=5), Reference(folder))


def trimmed(folder: Path, family: str, ids: Tokens, **options: Any) -> Setup:
    """The backend of a folder with `draft_head.json`."""
    write_tiny_model(folder, family, **options)
    (folder / "draft_head.json").write_text(json.dumps(ids), encoding="utf-8")
    return Setup(MlxBackend(folder, prefill_step_size=512), Reference(folder), ids)


# ---------------------------------------------------------------- one sequence, round by round


@dataclass(frozen=True)
class Round:
    """What happens in one round; numbers that are too large mean: as many as there are."""

    draft: bool = False
    """The target waits: `draft` is asked for; else `prepare`."""
    fan_out: tuple[int, ...] = (2, 1, 2, 1, 2)
    depth: int = 3
    layers: int = 3
    """Layers or tokens that are taken before the generator is closed."""
    accepted: int = 0
    """Draft tokens that the target accepts."""
    hit: int | None = 0
    """Which of the prepared outcomes of that length comes true; None for none of them."""
    follow: int = 3
    """Tokens of the hit branch that are verified next."""
    astray: int = 0
    """Tokens after these that are not of the branch."""
    back: int = 0
    """How many committed tokens the next `commit` repeats."""
    changed: int = 0
    """How many of those are not what they were."""


rounds = st.builds(
    Round,
    draft=st.sampled_from([False, False, False, True]),
    fan_out=st.lists(st.integers(0, 3), max_size=6).map(tuple),
    depth=st.integers(0, 4),
    layers=st.integers(0, 4),
    accepted=st.integers(0, 5),
    hit=st.none() | st.integers(0, 2),
    follow=st.integers(0, 4),
    astray=st.sampled_from([0, 0, 1, 2]),
    back=st.sampled_from([0, 0, 0, 1, 2, 6]),
    changed=st.sampled_from([0, 0, 0, 1, 3]),
)


@dataclass
class Line:
    """One open sequence; does rounds and checks every draft against fresh drafting."""

    setup: Setup
    sampling: Sampling
    only_likely: bool = False
    """Fewer outcomes may be prepared for than were requested."""
    committed: Tokens = field(default_factory=lambda: list(PROMPT))
    pending: int = 120
    next_draft: Tokens = field(default_factory=lambda: [7, 160, 31])
    news_from: int = len(PROMPT)
    outcomes_hit: int = 0

    def __post_init__(self) -> None:
        self.number = next(NUMBERS)
        for _ in self.setup.backend.open(self.number, list(self.committed), self.sampling):
            pass

    def play(self, played: Round) -> None:
        """One round: what was committed since, then a tree or a draft, then an outcome.

        After a failure the sequence is closed: beside it, those of other tests would not go alone.
        """
        try:
            self._play(played)
        except BaseException:
            self.setup.backend.close(self.number)
            raise

    def _play(self, played: Round) -> None:
        news = self.committed[self.news_from :]
        self.setup.backend.commit(self.number, self.news_from, news)
        if played.draft:
            self._draft(played)
        else:
            layers = self._prepare(played)
            self._outcome(played, layers)
            self._rewrite(played)

    def _draft(self, played: Round) -> None:
        layers = self.setup.backend.draft(self.number, self.pending, played.depth)
        drafted = drafts(islice((one for one in layers if one is not None), played.layers))
        layers.close()
        assert len(drafted) == min(played.depth, played.layers)
        self.next_draft = [token for token, *_ in drafted]
        prefix = [*self.committed, self.pending]
        [distributions] = self.setup.distributions([prefix + self.next_draft], self.sampling)
        for distribution, token in zip(distributions[len(self.committed) :], drafted, strict=False):
            distribution.check_drafted(token)
        self.news_from = len(self.committed)

    def _prepare(self, played: Round) -> list[TreeLayer]:
        chain = [self.pending, *self.next_draft]
        tree = self.setup.backend.prepare(
            self.number, read_tree(chain), list(played.fan_out[: len(chain)]), played.depth
        )
        layers = list(islice((layer for layer in tree if layer is not None), played.layers))
        tree.close()
        self._check_tree(played, chain, layers)
        return layers

    def _check_tree(self, played: Round, chain: Tokens, layers: list[TreeLayer]) -> None:
        wanted = list(played.fan_out[: len(chain)])
        depth = min(played.depth, played.layers)
        assert len(layers) == (depth if any(wanted) else 0)
        if not layers:
            return
        roots = layers[0].outcomes
        assert all(layer.outcomes == roots for layer in layers)
        found = [sum(root.accepted == k for root in roots) for k in range(len(wanted))]
        if self.only_likely:
            assert all(few <= many for few, many in zip(found, wanted, strict=True))
        else:
            assert found == wanted
        trunk = self.committed + chain
        paths = [
            self.committed + chain[: root.accepted + 1] + [root.bonus] + branch_of(layers, index)
            for index, root in enumerate(roots)
        ]
        distributions, *branch_distributions = self.setup.distributions(
            [trunk, *paths], self.sampling
        )
        for k in range(len(wanted)):
            bonuses = [root.bonus for root in roots if root.accepted == k]
            rejected = chain[k + 1] if k + 1 < len(chain) else None
            distributions[len(self.committed) + k].check_best(bonuses, without=rejected)
        for index, (root, of_branch) in enumerate(zip(roots, branch_distributions, strict=True)):
            start = len(self.committed) + root.accepted + 1
            for distribution, layer in zip(of_branch[start:], layers, strict=False):
                distribution.check_drafted(
                    DraftedToken(layer.tokens[index], layer.confidences[index])
                )

    def _outcome(self, played: Round, layers: list[TreeLayer]) -> None:
        chain = [self.pending, *self.next_draft]
        accepted = min(played.accepted, len(self.next_draft))
        roots = layers[0].outcomes if layers else []
        hits = [index for index, root in enumerate(roots) if root.accepted == accepted]
        self.news_from = len(self.committed)
        self.committed = self.committed + chain[: accepted + 1]
        if played.hit is None or not hits:
            prepared = {roots[index].bonus for index in hits}
            self.pending = next(token for token in range(50, 99) if token not in prepared)
            self.next_draft = [60, 61, 62][: played.follow]
        else:
            index = hits[played.hit % len(hits)]
            self.pending = roots[index].bonus
            self.next_draft = branch_of(layers, index)[: played.follow]
            others = [(token + 1) % VOCABULARY for token in branch_of(layers, index)]
            self.next_draft += others[played.follow :][: played.astray]
            self.outcomes_hit += 1

    def _rewrite(self, played: Round) -> None:
        """Go back further than was told before, perhaps to other tokens."""
        self.news_from = max(0, self.news_from - played.back)
        for at in range(self.news_from, min(self.news_from + played.changed, len(self.committed))):
            if played.back:
                self.committed[at] = (self.committed[at] + 1) % VOCABULARY


def branch_of(layers: list[TreeLayer], index: int) -> Tokens:
    return [layer.tokens[index] for layer in layers]


SCRIPT = [
    Round(),  # a hit at k = 0, on a tree that was finished
    Round(accepted=3, follow=2, hit=0),  # all accepted, hit at k = K
    Round(accepted=1, layers=1, hit=1),  # the tree is dropped after one layer
    Round(accepted=1, hit=None),  # a miss ...
    Round(draft=True),  # ... the target waits for a draft
    Round(accepted=2, layers=0),  # nothing of the tree was grown
    Round(hit=None, follow=0),  # a miss ...
    Round(accepted=0, back=6),  # ... the bonus token alone is verified; committed tokens repeated
    Round(accepted=1, hit=0, back=3, changed=2),  # true rewinds
    Round(draft=True, layers=2),
    Round(draft=True, depth=4, layers=4),
    Round(accepted=4, hit=1, follow=1, astray=2),  # only the beginning of a branch is adopted
    Round(accepted=1, hit=1, follow=4),
    Round(fan_out=(0, 3, 0, 0, 1), depth=4, layers=4, accepted=1, hit=2, follow=4),
    Round(fan_out=(0, 0)),
]


CASES = [
    *((family, "greedy") for family in (*DRAFTERS, *RECURRENT_DRAFTERS)),
    *((family, "sampled") for family in RECURRENT_DRAFTERS[:2]),
    *((family, ("sampled", "filtered")[at % 2]) for at, family in enumerate(DRAFTERS[::2])),
]


@pytest.mark.parametrize(("family", "sampling"), CASES)
def test_drafts_equal_fresh_drafting(family: str, sampling: str) -> None:
    """Every branch and draft of many rounds in a row is that of a fresh start from its prefix."""
    line = Line(setup_of(family), SAMPLINGS[sampling])
    for played in SCRIPT:
        line.play(played)
    assert line.outcomes_hit >= 6
    setup_of(family).backend.close(line.number)


@examples(50)
@given(
    family=st.sampled_from(["llama", "sliding", "gemma3"]),
    sampling=st.sampled_from(list(SAMPLINGS.values())),
    script=st.lists(rounds, min_size=1, max_size=8),
)
def test_random_rounds_equal_fresh_drafting(
    family: str, sampling: Sampling, script: list[Round]
) -> None:
    """So are those of random fan-outs, depths, outcomes, interruptions and rewinds."""
    line = Line(setup_of(family), sampling)
    for played in script:
        line.play(played)
    setup_of(family).backend.close(line.number)


@pytest.mark.parametrize("back", [0, 1, 3])
def test_a_branch_is_adopted_only_where_it_grew(back: int) -> None:
    """A bonus token that stands before the fork of its branch, after a rewind, is not a hit."""
    setup, number = setup_of("llama"), next(NUMBERS)
    backend = setup.backend
    list(backend.open(number, list(PROMPT), Sampling()))
    *_, layer = said(backend.prepare(number, read_tree([120, 160]), [2, 2], depth=2))
    filter_tokens = list(PROMPT[: len(PROMPT) - back])
    for root in layer.outcomes:
        backend.commit(number, len(filter_tokens), [])
        drafted = drafts(backend.draft(number, root.bonus, 2))
        [distributions] = setup.distributions(
            [[*filter_tokens, root.bonus, drafted[0].token]], Sampling()
        )
        for distribution, token in zip(distributions[len(filter_tokens) :], drafted, strict=True):
            distribution.check_drafted(token)
        backend.commit(number, len(filter_tokens), [])
        said(backend.prepare(number, read_tree([120, 160]), [2, 2], depth=2))


def test_candidates_of_replaced_tokens_are_forgotten() -> None:
    """Tokens that came by `commit`, were taken back, and are now the chain, fork anew."""
    setup, number = setup_of("llama"), next(NUMBERS)
    list(setup.backend.open(number, list(PROMPT), Sampling()))
    said(setup.backend.prepare(number, read_tree([120, 160]), [3, 3], depth=1))
    setup.backend.commit(number, len(PROMPT), [50, 60])
    setup.backend.commit(number, len(PROMPT), [])
    [layer] = said(setup.backend.prepare(number, read_tree([50, 60]), [0, 3], depth=1))
    [distributions] = setup.distributions([[*PROMPT, 50, 60]], Sampling())
    distributions[-1].check_best([root.bonus for root in layer.outcomes])


def test_interleaved_sequences_do_not_disturb_one_another() -> None:
    """Sequences that take turns, each with its own sampling, get their own drafts."""
    lines = [Line(setup_of("sliding"), sampling) for sampling in SAMPLINGS.values()]
    lines[0].pending, lines[1].pending = 33, 44
    for played in SCRIPT:
        for line in lines:
            line.play(played)
    for line in lines:
        line.setup.backend.close(line.number)


# ---------------------------------------------------------------- the head


TRIMMED: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama3": {},
    "qwen2": {},
    "gemma2": {},
    "glm4": {},
    "quantized": {},
    "untied quantized": {"config": {"tie_word_embeddings": False}},
}


@pytest.mark.parametrize("case", TRIMMED)
def test_a_trimmed_head_drafts_like_the_full_one_restricted(case: str, tmp_path: Path) -> None:
    """With `draft_head.json` only its ids are drafted: the full head's best among them."""
    ids: Tokens = np.random.default_rng(5).permutation(VOCABULARY)[:90].tolist()
    setup = trimmed(tmp_path, case.rsplit(maxsplit=1)[-1], ids, **TRIMMED[case])
    for sampling in (SAMPLINGS["greedy"], SAMPLINGS["filtered"]):
        line = Line(setup, sampling)
        for played in SCRIPT[:8]:
            line.play(played)
        assert line.outcomes_hit >= 3


@pytest.mark.parametrize(("most", "proposed"), [(2, {7, 160}), (None, {7, 160, 31})])
def test_only_the_first_tokens_of_a_head_are_proposed_where_columns_cost_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int | None, proposed: set[int]
) -> None:
    monkeypatch.setattr(mlx, "kernels", lambda: KERNELS["cpu"]._replace(widest_head=most))
    backend = trimmed(tmp_path, "llama", [7, 160, 31]).backend
    list(backend.open(1, list(PROMPT), SAMPLINGS["greedy"]))
    [layer] = said(backend.prepare(1, read_tree([120]), [9, 9], depth=1))
    assert {token for _, token in layer.outcomes} == proposed


@pytest.mark.parametrize("ids", [[5], [200, 5], [7, 160, 31]], ids=str)
def test_a_head_narrower_than_the_fan_out(tmp_path: Path, ids: Tokens) -> None:
    """A head of few tokens prepares what it can: all of them but the rejected one."""
    backend = trimmed(tmp_path, "llama", ids).backend
    for number, sampling in enumerate(SAMPLINGS.values()):
        list(backend.open(number, list(PROMPT), sampling))
        [layer] = said(backend.prepare(number, read_tree([120, 160]), [9, 9], depth=1))
        expected = {(0, token) for token in ids if token != 160} | {(1, token) for token in ids}
        assert expected == set(layer.outcomes)
        assert len(expected) == len(layer.outcomes)
        assert set(layer.tokens) <= set(ids)


def test_padding_is_never_drafted(tmp_path: Path) -> None:
    """Columns of the head that stand for no token are ignored, however likely they look."""
    folder = write_tiny_model(tmp_path / "loud", "llama", config={"vocab_size": 320})
    weights: Any = mx.load(str(folder / "model.safetensors"))
    embedding = weights["model.embed_tokens.weight"]
    embedding[VOCABULARY:] = 3 * embedding[40:72]
    mx.eval(weights)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    setup = Setup(MlxBackend(folder, prefill_step_size=512), Reference(folder))
    [[*_, row]] = setup.reference.rows([list(PROMPT)])
    assert row.argmax() >= VOCABULARY
    for sampling in SAMPLINGS.values():
        line = Line(setup, sampling)
        for played in SCRIPT[:6]:
            line.play(played)


# ---------------------------------------------------------------- work that is not done


@pytest.fixture
def nothing_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other test's KV serves a prompt of the llama backend."""
    backend = setup_of("llama").backend
    monkeypatch.setattr(backend, "_prompts", PrefixCache(0, 0))
    monkeypatch.setattr(backend, "_sequences", SequenceTable())


@pytest.fixture
def fed(monkeypatch: pytest.MonkeyPatch, nothing_cached: None) -> list[int]:
    """How many tokens each forward of the llama backend was given, from now on."""
    backend = setup_of("llama").backend
    model: Callable[..., mx.array] = backend._model
    counts: list[int] = []

    def counting(tokens: mx.array, cache: Any) -> mx.array:
        counts.append(tokens.shape[1])
        return model(tokens, cache=cache)

    for runner in (backend._runner, backend._filler):
        monkeypatch.setattr(runner, "model", counting)
    return counts


def test_nothing_is_computed_twice(fed: list[int]) -> None:
    """After a hit only the last token of the chain is new; the same question again is free."""
    backend, number = setup_of("llama").backend, next(NUMBERS)
    list(backend.open(number, list(PROMPT), Sampling()))
    # Nobody waits for it: on CUDA a chunk may be twice a step.
    assert fed == ([10, 2] if compute_unit() == "cuda" else [5, 5, 2])
    fed.clear()
    layers = said(backend.prepare(number, read_tree([120, 7, 160]), [2, 0, 2], depth=3))
    assert fed == [3, 4, 4, 4]
    fed.clear()
    [root] = [index for index, root in enumerate(layers[0].outcomes) if root.accepted == 2][:1]
    backend.commit(number, len(PROMPT), [120, 7, 160])
    chain = [layers[0].outcomes[root].bonus, *branch_of(layers, root)]
    said(backend.prepare(number, read_tree(chain), [1], depth=1))
    assert fed == [1, 1]
    fed.clear()
    said(backend.prepare(number, read_tree(chain), [1], depth=1))
    assert fed == [1]
    fed.clear()
    drafted = drafts(backend.draft(number, chain[0], 3))
    assert chain[1:] == [token for token, *_ in drafted]
    # Where depths are begun ahead, a draft begins with the pending token itself.
    assert fed == ([1, 1] if backend.ahead is None else [1, 1, 1])


def test_committed_tokens_are_fed_with_the_pending_one(fed: list[int]) -> None:
    """In one pass; many at once, while the target is busy."""
    backend, number = setup_of("llama").backend, next(NUMBERS)
    list(backend.open(number, list(PROMPT), Sampling()))
    fed.clear()
    backend.commit(number, len(PROMPT), [120, 7])
    assert fed == []
    drafts(backend.draft(number, 160, 2))
    assert fed == [3, 1]
    fed.clear()
    backend.commit(number, len(PROMPT) + 2, [160, *range(20, 30)])
    assert fed[0] >= 10
    fed.clear()
    backend.commit(number, len(PROMPT) + 1, [99])
    said(backend.prepare(number, read_tree([5, 6]), [1, 1], depth=1))
    assert fed == [3, 2]


@pytest.mark.usefixtures("nothing_cached")
def test_an_abandoned_prefill_opens_nothing() -> None:
    """A prefill yields between its chunks; closed there, the sequence is not open."""
    backend, number = setup_of("llama").backend, next(NUMBERS)
    opening = backend.open(number, list(PROMPT), Sampling())
    next(opening)
    opening.close()
    with pytest.raises(ProtocolError, match=f"sequence {number} is not open"):
        backend.commit(number, 0, [])


# ---------------------------------------------------------------- the edges


def test_an_empty_prompt_can_be_drafted_for() -> None:
    """The pending token may be the first of all; the caller's list stays the caller's."""
    setup, number = setup_of("llama"), next(NUMBERS)
    told: Tokens = []
    list(setup.backend.open(number, told, Sampling()))
    [drafted] = drafts(setup.backend.draft(number, 120, 1))
    assert told == []
    [[distribution]] = setup.distributions([[120]], Sampling())
    distribution.check_drafted(drafted)


def test_unknown_sequences_are_refused() -> None:
    """A sequence that is not open is a ProtocolError with its number; closing it is none."""
    backend, number = setup_of("llama").backend, next(NUMBERS)
    list(backend.open(number, list(PROMPT), Sampling()))
    backend.close(number)
    backend.close(number)
    asked: list[Callable[[], object]] = [
        lambda: backend.commit(number, 0, []),
        lambda: next(backend.prepare(number, read_tree([1]), [1], 1)),
        lambda: next(backend.draft(number, 1, 1)),
    ]
    for ask in asked:
        with pytest.raises(ProtocolError, match=f"sequence {number} is not open"):
            ask()


def test_tokens_that_were_never_told_cannot_be_kept() -> None:
    """A `base` beyond the committed tokens is a ProtocolError, although the trunk is longer."""
    backend, number = setup_of("llama").backend, next(NUMBERS)
    list(backend.open(number, list(PROMPT), Sampling()))
    said(backend.prepare(number, read_tree([120, 7, 160]), [1], 1))
    with pytest.raises(ProtocolError, match="cannot rewind 12 tokens to 13"):
        backend.commit(number, 13, [])
    backend.commit(number, 12, [120])
    backend.commit(number, 13, [])


def test_closing_frees_the_kv_at_once() -> None:
    """The buffers of a closed sequence do not wait for the garbage collector."""
    backend, number = setup_of("llama").backend, next(NUMBERS)
    list(backend.open(number, list(PROMPT), Sampling()))
    caches = [weakref.ref(cache) for cache in backend._sequences[number].store.caches]
    assert all(cache() is not None for cache in caches)
    backend.close(number)
    assert [None] * len(caches) == [cache() for cache in caches]


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in DRAFTERS])
def test_models_that_cannot_draft_trees_are_refused(family: str) -> None:
    """Recurrent models and dynamic NTK scaling are a ModelError that says which of them."""
    reason = "dynamic NTK" if family == "dynamic" else "cannot draft"
    assert family in (*RECURRENT, "dynamic")
    with pytest.raises(ModelError, match=reason):
        MlxBackend(tiny_folder(family), prefill_step_size=512)


def test_a_broken_draft_head_is_refused(tmp_path: Path) -> None:
    """A `draft_head.json` that is no list of ids is a ModelError."""
    folder = shutil.copytree(tiny_folder("llama"), tmp_path / "m")
    (folder / "draft_head.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ModelError, match="is not a list of token ids"):
        MlxBackend(folder, prefill_step_size=512)


def test_the_backend_says_who_it_is() -> None:
    """Its identity is that of its folder."""
    folder = tiny_folder("qwen2")
    identity = setup_of("qwen2").backend.identity
    assert identity.backend == "mlx"
    assert identity.model == str(folder)
    assert read_vocabulary(folder).fingerprint == identity.tokenizer_fingerprint
    assert identity.vocabulary_size == VOCABULARY
    assert identity.context_length == 512
    assert identity.max_draft_tokens == MAX_DRAFT_TOKENS
