"""Kernels of our own by device, and what suits it; MLX computes what they do not take.

A new kernel for attention or for the choice of tokens is entered here, and so is whatever else the
rest of the services has to know of a device. Those for products and blocks are patches of a model's
layers (`services.mlx.patches`).
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import mlx.core as mx

from protocol.settings import FREQUENT_TOKENS
from services.kernels.cpu import attention as cpu_attention
from services.kernels.cpu.choice import choose_on_cpu
from services.kernels.cuda import attention as cuda_attention
from services.kernels.cuda.blocks import equip_for_cuda
from services.kernels.cuda.kv_rows import Attend
from services.kernels.cuda.sampling.best import find_best
from services.kernels.cuda.sampling.choose import choose_on_cuda
from services.kernels.cuda.sampling.guess import guess_tokens
from services.kernels.metal import choice
from services.mlx.loader import compute_unit
from services.runtime.preparation import Steps


class Kernels(NamedTuple):
    """The kernels of a device, each of which returns None for a call that it does not take."""

    device: str
    """Its name: "cpu", "metal" or "cuda"."""
    attend: tuple[Callable[..., mx.array | None], ...]
    """Tried in turn: (queries, keys, values, scale, mask) -> attention."""
    on_gpu: bool = True
    """False if passes compete with this process for cores: none starts before its token is read."""
    attends_in_traces: bool = True
    """True if attention can be part of a graph that is recorded."""
    choose: Callable[..., mx.array | None] = lambda *_: None
    """The target's tokens, as `sampling.device.begin`."""
    find_best: Callable[..., mx.array | None] = lambda *_: None
    """The best columns of rows, as `cuda.sampling.best.find_best`."""
    guess: Callable[..., tuple[mx.array, mx.array] | None] = lambda *_: None
    """The drafter's tokens, as `cuda.sampling.guess.guess_tokens`."""
    attend_table: Attend | None = None
    """Attention over slots of several sequences in one buffer."""
    equip: Callable[[Any], Steps[Any]] | None = None
    """Lets traces of a model use kernels for products and blocks."""
    widest_head: int | None = FREQUENT_TOKENS
    """Most columns of a drafter's trimmed head; None: one more costs next to nothing."""
    most_shared_rows: int = 64
    """Most tokens of a pass that several sequences share."""
    plans_shapes: bool = False
    """True if MLX plans its kernels for each new shape, so that sizes should recur."""
    holds_arrays: bool = False
    """True if the arrays of a pass are held until all of its kernels have finished."""
    batches_recurrences: bool = False
    """True if recurrences of equal length should form one batch: MLX has no kernel for them, and
    each of their steps is a few launches. On a CPU the copies cost more.
    """


KERNELS = {
    "cpu": Kernels(
        "cpu",
        (cpu_attention.attend,),
        on_gpu=False,
        attends_in_traces=False,
        choose=choose_on_cpu,
        most_shared_rows=16,
    ),
    "metal": Kernels("metal", (choice.attend,)),
    "cuda": Kernels(
        "cuda",
        (cuda_attention.attend, cuda_attention.attend_many),
        choose=choose_on_cuda,
        find_best=find_best,
        guess=guess_tokens,
        attend_table=cuda_attention.attend_table,
        equip=equip_for_cuda,
        widest_head=None,
        plans_shapes=True,
        holds_arrays=True,
        batches_recurrences=True,
    ),
}


@cache
def kernels() -> Kernels:
    """Return the kernels of the device that this process has chosen for MLX, once for all."""
    return KERNELS[compute_unit()]
