"""Warm-up: the first forward pass of every shape, before a request needs it.

A GPU compiles or plans its kernels when it first sees a shape; a round that pays for that takes ten
times as long and misleads the planner's estimates.

A model whose logits are NaN is not warmed up; its requests report the error.
"""

import contextlib
import logging
from collections.abc import Iterator

from protocol.decoding.token_tree import CHAIN_ROWS, TREE_ROWS, read_tree
from protocol.errors import NotNumbers
from protocol.messages import Sampling
from services.drafter.backends.base import DEFAULT_ROUND_OPTIONS, DraftBackend, RoundOptions
from services.runtime.preparation import Steps
from services.runtime.sequence_table import TRIAL_SEQUENCE
from services.verifier.trial_sequence import TrialSequence
from services.verifier.verifier import Verifier

_log = logging.getLogger(__name__)

_PROMPT = list(range(1, 17))
_LONGEST = 8
"""Longest warmed-up chain of draft tokens; longer ones are rare."""
_LONG_PROMPT = [token % 16 for token in range(640)]
"""A prompt of common length; passes of all sizes are computed after it, traced or not."""
_BRANCHES = 16
_DEPTH = 4
_OPTIONS = (
    DEFAULT_ROUND_OPTIONS,
    RoundOptions(siblings=4),
)
"""Chains and trees."""


@contextlib.contextmanager
def _unless_broken() -> Iterator[None]:
    try:
        yield
    except NotNumbers as error:
        _log.warning("not warmed up: %s", error)


def warm_verifier(verifier: Verifier) -> Steps[None]:
    """Prefill and verify a chain of each length; after a long prompt all sizes, and trees."""
    trial = TrialSequence(verifier)
    with _unless_broken():
        for drafted in range(min(_LONGEST, verifier.max_draft_tokens) + 1):
            trial.open(_PROMPT)
            trial.verify(list(range(drafted)))
            yield
        if verifier.takes_trees:
            trial.open(_LONG_PROMPT)
            chains = [list(range(rows - 1)) for rows in CHAIN_ROWS]
            for parents in [*chains, *([0] * (rows - 1) for rows in TREE_ROWS)]:
                yield
                trial.verify(parents)
    trial.close()


def warm_drafter(backend: DraftBackend) -> Steps[None]:
    """Prefill, prepare branches for a chain of each length, and draft; then again with noise."""
    with _unless_broken():
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


def _prepare(
    backend: DraftBackend, drafted: int, options: RoundOptions = DEFAULT_ROUND_OPTIONS
) -> None:
    share = _BRANCHES // (drafted + 1)
    fan_out = [share] * drafted + [_BRANCHES - share * drafted]
    tree = read_tree(_PROMPT[: drafted + 1])
    for _ in backend.prepare(TRIAL_SEQUENCE, tree, fan_out, _DEPTH, options):
        pass


def _draft(backend: DraftBackend) -> None:
    for _ in backend.draft(TRIAL_SEQUENCE, _PROMPT[0], _DEPTH, RoundOptions()):
        pass
