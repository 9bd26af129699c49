"""Choose by experiment how the states of a model's sequences rewind after a rejected draft.

The fastest way that reproduces mlx-lm's own logits is used. A model whose layers hold only keys and
values needs no test: slots are cut.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx
from mlx_lm.models.cache import (
    ArraysCache,
    ChunkedKVCache,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from protocol.errors import ModelError
from services.kv.branching import BranchingState
from services.kv.cache import KVStore
from services.kv.layered import LayeredState, flatten_caches
from services.kv.recording import record_pass, start_recording
from services.kv.replay import (
    ReplayPlan,
    has_known_recurrence,
    install_hooks,
    plan_replay,
)
from services.kv.state import SequenceState
from services.mlx.loader import windows_of
from services.mlx.selftest import TOLERANCES, measure_distance

_log = logging.getLogger(__name__)

Way = Literal["slots", "windows", "replay", "refeed", "none"]
"""How a state rewinds.

`slots`: keys and values are cut; `windows`: so are those of sliding layers; `replay`: recurrences
are recomputed; `refeed`: the accepted tokens are fed again with the next pass; `none`: plain
decoding.
"""

_PROMPT, _CHAIN, _NEXT = [1, 2, 3, 4], [5, 6, 7, 8], [9, 10]
"""Tokens of the test. Two of the chain are accepted."""
_KEPT = 2


@dataclass(frozen=True)
class StateFactory:
    """Creates the states of one model's sequences."""

    make: Callable[[], SequenceState]
    way: Way
    layers: str
    """A description of its layers."""
    reason: str = ""
    """Why it cannot rewind, or rewinds in a slower way than expected."""

    @property
    def rewinds(self) -> bool:
        """True if drafts can be verified."""
        return self.way != "none"

    @property
    def description(self) -> str:
        """How the model rewinds after a rejected draft, in words."""
        return f"{self.layers}; {_WORDS[self.way]}{self.reason and ': '}{self.reason}"


_WORDS: dict[Way, str] = {
    "slots": "rejected tokens are cut off",
    "windows": "rejected tokens are cut off",
    "replay": "recurrent states are recomputed from recorded inputs",
    "refeed": "accepted tokens are fed again after a rejection",
    "none": "decoded plainly",
}


def find_rewinding(model: Any, *, bucketed: bool, whole: bool = False) -> StateFactory:
    """Return the fastest way to rewind that works for this model.

    Args:
        model: an mlx-lm model; its recurrences may get hooks (`kv.replay`).
        bucketed: as for `KVStore`.
        whole: keep all rows of sliding layers, which the CPU kernels can do without copies.

    Raises:
        ModelError: mlx-lm itself cannot run the model here.
    """

    def make_caches() -> Sequence[Any]:
        caches: Sequence[Any] = make_prompt_cache(model)
        return caches

    caches = make_caches()
    flat, layers = flatten_caches(caches), _describe(make_caches())
    if whole or all(type(cache) is KVCache for cache in caches):
        windows = windows_of(model)
        return StateFactory(lambda: KVStore(windows, bucketed=bucketed), "slots", layers)
    trial = _Trial(model, make_caches)
    replay = None
    if any(type(cache) is ArraysCache for cache in flat):
        replay = _find_replay(model, make_caches)

    def factory(*, own: bool, plan: ReplayPlan | None) -> Callable[[], SequenceState]:
        return lambda: LayeredState(make_caches, bucketed=bucketed, replay=plan, own=own)

    if replay is not None and trial.proves(factory(own=True, plan=replay), "replay"):
        return StateFactory(factory(own=True, plan=replay), "replay", layers)
    for own in (True, False):
        make = factory(own=own, plan=None)
        if trial.proves(
            make, "feeding again" if own else "feeding tokens again, with mlx-lm's caches"
        ):
            tried = trial.reason and f"another way was tried, and {trial.reason}"
            return StateFactory(make, _way_of(flat, own=own), layers, tried)
    return StateFactory(factory(own=False, plan=None), "none", layers, trial.reason)


def find_branching(model: Any, *, bucketed: bool) -> Callable[[], BranchingState]:
    """Return a factory for the states of a drafter with recurrent layers.

    Raises:
        ModelError: a layer is neither attention nor a recurrence that can be recomputed.
    """

    def make_caches() -> Sequence[Any]:
        caches: Sequence[Any] = make_prompt_cache(model)
        return caches

    strange = [c for c in make_caches() if type(c) not in (KVCache, ArraysCache)]
    if strange:
        raise ModelError(
            f"a layer keeps its state in a {type(strange[0]).__name__} next to recurrent ones: "
            "such models verify drafts, but cannot draft"
        )
    plan = _find_replay(model, make_caches)

    def make() -> BranchingState:
        if plan is None:
            raise ModelError("its recurrent layers cannot be recomputed")
        return BranchingState(make_caches, plan, bucketed=bucketed)

    if plan is None or not _Trial(model, make_caches).proves(make, "drafting"):
        raise ModelError(
            "its recurrent layers are of a kind that verifies drafts, but cannot draft: a branch "
            "needs the state after any token"
        )
    return make


def predict_rewinding(model: Any) -> str:
    """Predict in words, without running the model, which way `find_rewinding` will choose."""
    caches = make_prompt_cache(model)
    flat = flatten_caches(caches)
    way = _way_of(flat, own=True)
    if way == "refeed" and has_known_recurrence(model, flat):
        way = "replay"
    return StateFactory(lambda: KVStore([], bucketed=False), way, _describe(caches)).description


def _way_of(caches: Sequence[Any], *, own: bool) -> Way:
    """Return how a state without recomputation rewinds."""
    kinds = {type(cache) for cache in caches}
    if kinds <= {KVCache, ChunkedKVCache}:
        return "slots"
    return "windows" if own and kinds <= {KVCache, ChunkedKVCache, RotatingKVCache} else "refeed"


def _describe(caches: Sequence[Any]) -> str:
    """Return the kinds of layers and how many there are of each."""
    names: dict[str, int] = {}
    for cache in flatten_caches(caches):
        name = {KVCache: "attention", ArraysCache: "recurrent"}.get(type(cache))
        if type(cache) is RotatingKVCache:
            name = f"window of {cache.max_size}"
        if type(cache) is ChunkedKVCache:
            name = f"chunk of {cache.chunk_size}"
        name = name or type(cache).__name__
        names[name] = names.get(name, 0) + 1
    return ", ".join(f"{count} x {name}" for name, count in names.items())


def _find_replay(model: Any, make_caches: Callable[[], Sequence[Any]]) -> ReplayPlan | None:
    """Return how the model's recurrent layers are recomputed; None if their kind is unknown."""
    convolutions = install_hooks(model)
    caches = make_caches()
    try:
        model(mx.array([_PROMPT]), cache=caches)
        recording = start_recording(keeps_steps=True)
        try:
            model(mx.array([_CHAIN]), cache=caches)
        finally:
            recording.stop()
        states = [c for c in flatten_caches(caches) if type(c) not in (KVCache, RotatingKVCache)]
        return plan_replay(states, recording, convolutions, len(_CHAIN))
    # Models of unknown makes can fail in any way here: another way to rewind is used.
    except Exception as error:  # noqa: BLE001
        _log.info("recurrent layers cannot be recomputed: %s", error)
        return None


class _Trial:
    """A few tokens with a rejection among them, compared with mlx-lm's own plain decoding."""

    def __init__(self, model: Any, make_caches: Callable[[], Sequence[Any]]) -> None:
        self._model = model
        self.reason = ""
        kept = _CHAIN[:_KEPT]
        try:
            self._expected = self._decode(make_caches(), [*kept, *_NEXT])
            self._wrong = self._decode(make_caches(), [*_CHAIN, *_NEXT])
        # Models of unknown makes can fail in any way here.
        except Exception as error:
            raise ModelError(
                f"mlx-lm loads this model, but cannot run it on this machine: {error}"
            ) from error

    def _decode(self, caches: Any, tokens: list[int]) -> mx.array:
        """Return [2, vocabulary] logits after the last two tokens, one pass each."""
        self._model(mx.array([_PROMPT]), cache=caches)
        rows = [self._model(mx.array([[token]]), cache=caches)[0, -1] for token in tokens]
        is_whole = rows[0].dtype == mx.float32
        self._tolerance = TOLERANCES["rewinding in float32" if is_whole else "rewinding"]
        return mx.stack(rows[-len(_NEXT) :]).astype(mx.float32)

    def proves(self, make: Callable[[], SequenceState], way: str) -> bool:
        """Test if the logits after a rejection are mlx-lm's; if not, `reason` says why."""
        try:
            logits = self._reject(make())
        # Models of unknown makes can fail in any way here.
        except Exception as error:  # noqa: BLE001
            self.reason = f"{type(error).__name__}: {error}"
            _log.warning("%s does not work for this model: %s", way, self.reason)
            return False
        finally:
            record_pass(wanted=False)
        distance = measure_distance(self._expected, logits)
        # A wrong state must be clearly farther away.
        limit = min(self._tolerance, 0.25 * measure_distance(self._expected, self._wrong))
        if distance <= max(TOLERANCES["rewinding in any case"], limit):
            return True
        self.reason = f"after a rejected draft its logits are off by {distance:.2g}"
        _log.warning("%s does not work for this model: %s", way, self.reason)
        return False

    def _reject(self, state: SequenceState) -> mx.array:
        state.append(len(_PROMPT), whole=True)
        self._model(mx.array([_PROMPT]), cache=state.caches)
        state.commit(len(_PROMPT))
        state.append(len(_CHAIN))
        self._model(mx.array([_CHAIN]), cache=state.caches)
        state.commit(len(_PROMPT) + _KEPT)
        tokens = [*_CHAIN[_KEPT - state.owed : _KEPT], *_NEXT]
        state.append(len(_NEXT))
        rows: mx.array = self._model(mx.array([tokens]), cache=state.caches)[0, -len(_NEXT) :]
        return rows.astype(mx.float32)
