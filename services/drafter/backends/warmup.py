"""Passes that prepare a drafter: first ones of every shape on a GPU, and timed ones.

A GPU compiles or plans its kernels when it first sees a shape; a round that pays for that takes ten
times as long and misleads the planner's estimates. Without T_d the planner assumes that drafts pay.
"""

import time

from protocol.decoding.token_tree import read_tree
from protocol.messages import PassTimes, Sampling
from services.drafter.backends.base import DEFAULT_ROUND_OPTIONS, DraftBackend, RoundOptions
from services.runtime.loop import Identity
from services.runtime.preparation import Steps, unless_broken
from services.runtime.sequence_table import TRIAL_SEQUENCE

_PROMPT = list(range(1, 17))
_LONG_PROMPT = [token % 16 for token in range(640)]
"""A prompt of common length."""
_BRANCHES = 16
_DEPTH = 4
_OPTIONS = (
    DEFAULT_ROUND_OPTIONS,
    RoundOptions(siblings=4),
)
"""Chains and trees."""
_BUDGET_S = 0.1
"""After this time no further draft is timed; the second one always is."""


def warm_drafter(backend: DraftBackend) -> Steps[None]:
    """Prefill, prepare branches for a chain of each length, and draft; then again with noise."""
    with unless_broken():
        yield from _warm_branches(backend)
    backend.close(TRIAL_SEQUENCE)


def _warm_branches(backend: DraftBackend) -> Steps[None]:
    for _ in backend.open(TRIAL_SEQUENCE, _PROMPT, Sampling()):
        pass
    for drafted in range(_DEPTH + 1):
        _prepare(backend, drafted)
        yield
    _draft(backend)
    backend.close(TRIAL_SEQUENCE)
    yield
    for _ in backend.open(TRIAL_SEQUENCE, _PROMPT, Sampling(temperature=1.0)):
        pass
    _prepare(backend, _DEPTH)
    _draft(backend)
    yield
    backend.close(TRIAL_SEQUENCE)
    for _ in backend.open(TRIAL_SEQUENCE, _LONG_PROMPT, Sampling()):
        pass
    for options in _OPTIONS if backend.identity.takes_trees else _OPTIONS[:1]:
        yield
        _prepare(backend, _DEPTH, options)
    # Adopt a prepared branch and extend it.
    backend.commit(TRIAL_SEQUENCE, len(_LONG_PROMPT), _PROMPT[:_DEPTH])
    _prepare(backend, _DEPTH)


def time_drafts(backend: DraftBackend, identity: Identity) -> Steps[None]:
    """Measure T_d, of a token drafted while the target waits; a line server is not asked."""
    if not backend.identity.vocabulary_size:
        return
    times: list[float] = []
    ends = time.perf_counter() + _BUDGET_S
    with unless_broken():
        while len(times) < 2 or time.perf_counter() < ends:
            for _ in backend.open(TRIAL_SEQUENCE, _PROMPT, Sampling()):
                pass
            began = time.perf_counter()
            tokens = _draft(backend)
            if not tokens:
                break
            times.append(1e3 * (time.perf_counter() - began) / tokens)
            yield
    backend.close(TRIAL_SEQUENCE)
    if times[1:]:
        identity.pass_times = PassTimes(chains={1: min(times[1:])})  # the first one compiles


def _prepare(
    backend: DraftBackend, drafted: int, options: RoundOptions = DEFAULT_ROUND_OPTIONS
) -> None:
    share = _BRANCHES // (drafted + 1)
    fan_out = [share] * drafted + [_BRANCHES - share * drafted]
    tree = read_tree(_PROMPT[: drafted + 1])
    for _ in backend.prepare(TRIAL_SEQUENCE, tree, fan_out, _DEPTH, options):
        pass


def _draft(backend: DraftBackend) -> int:
    """Draft while the target would wait; return the number of tokens."""
    layers = backend.draft(TRIAL_SEQUENCE, _PROMPT[0], _DEPTH, RoundOptions())
    return sum(layer is not None for layer in layers)
