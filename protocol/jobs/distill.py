"""Settings of a distillation, its prompts, and its events: one JSON object a line on stdout."""

from typing import Annotated, Literal

import msgspec

from protocol.messages import Token
from protocol.settings import ChildSettings, Precision

_Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
_Amount = Annotated[float, msgspec.Meta(ge=0)]
_Count = Annotated[int, msgspec.Meta(ge=0)]


class DistillSettings(ChildSettings, frozen=True, kw_only=True):
    """One distillation: a drafter trained on the target's own distribution (`services/distill`)."""

    target: str
    """Folder of the target."""
    out: str
    """Folder of the run, and of the drafter; with `evaluate_only`, of the drafter to evaluate."""
    evaluate_only: bool = False
    threads: Annotated[int, msgspec.Meta(ge=1)] = 1
    """BLAS threads on Linux."""
    precision: Precision = "auto"
    """Precision of the forward passes: auto is bfloat16 on a GPU and float32 on a CPU."""
    seed: _Count = 0

    opening: list[int] = msgspec.field(default_factory=list)
    """Tokens before the user's words; the whole prompt if the target invents the user's words."""
    turn: list[int] = msgspec.field(default_factory=list)
    """Tokens between the user's last word and the assistant's first; empty: no chat."""
    stop_ids: list[int] = msgspec.field(default_factory=list)
    texts: list[str] = msgspec.field(default_factory=list)
    """Folders of runs whose texts are used for training; empty: this run generates its own."""
    prompts: str = ""
    """File of tokenised prompts (`protocol.jobs.distill.TokenPrompt`, one JSON a line)."""
    temperatures: Annotated[tuple[_Amount, ...], msgspec.Meta(min_length=1)] = (0.0, 0.3, 0.7, 1.0)
    """Temperatures of the answers, in equal shares; the user's words are always sampled at 1."""
    length: Annotated[int, msgspec.Meta(ge=16)] = 512
    """Tokens of a sequence, prompt included."""
    user_tokens: Annotated[int, msgspec.Meta(ge=1)] = 160
    """Longest invented prompt."""
    data_batch: _Count = 0
    """Sequences generated together; 0: 1024 on CUDA, 64 on Metal, 8 on a CPU."""
    data_tokens: _Count = 0
    """Tokens to generate; 0 leaves it to `data_minutes`."""
    data_minutes: _Amount = 0.0
    """Time to generate; 0 with `data_tokens` 0: a third of `minutes`."""
    held_out: Annotated[float, msgspec.Meta(gt=0, le=0.5)] = 0.05
    """Share of the sequences that is kept for validation."""

    layers: Annotated[int, msgspec.Meta(ge=1)] = 2
    """Layers of the drafter, copied from the target's first and last ones."""
    init_layers: list[_Count] = msgspec.field(default_factory=list)
    """Layers of the target to copy instead."""
    head_size: _Count = 0
    """The drafter's head keeps this many tokens, the most frequent ones; 0 keeps all."""
    mlp: _Count = 0
    """Hidden columns that each MLP keeps, those of largest norm; 0 keeps all."""
    bits: Literal[0, 4, 8] = 0
    """Bits of the written drafter's matrices; 0: half precision."""
    init_drafter: str = ""
    """Folder of a drafter to start from, of this shape or of fewer layers."""

    finish: _Share = 0.5
    """Last part of the budget, in which the loss is total variation; before it, cross-entropy."""
    loss_temperature: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    """Temperature of both distributions in the loss."""
    user_weight: _Share = 0.0
    """Weight of the user's tokens in the loss; the answer's tokens have 1."""
    minutes: _Amount = 10.0
    """The run's time over all resumptions: texts, training and evaluation."""
    steps: _Count = 0
    """Training steps, over all resumptions, instead of a time limit; 0 leaves it to `minutes`."""
    session_minutes: _Amount = 0.0
    """Stop this call, resumable, after this time; 0 is unlimited."""
    batch: _Count = 0
    """Sequences per step; 0: 64 on CUDA, 8 on Metal, 4 on a CPU."""
    learning_rate: Annotated[float, msgspec.Meta(gt=0)] = 1e-3
    warmup: _Share = 0.03
    """Share of the budget for warmup."""
    weight_decay: _Amount = 0.01
    clip: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    """Largest norm of the gradient."""
    checkpoint_s: Annotated[float, msgspec.Meta(gt=0)] = 60.0


class TokenPrompt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One prompt, rendered by the chat template up to the assistant's first token."""

    tokens: list[Token]
    category: str = ""


class DistillNote(msgspec.Struct, frozen=True, tag="note"):
    """A sentence for the user."""

    text: str


class DistillProgress(msgspec.Struct, frozen=True, kw_only=True, tag="progress"):
    """Progress of a phase; sent about once a second."""

    phase: str
    """"generating" or "training"."""
    done: float
    """Share of the phase's budget, 0 to 1."""
    seconds_left: float
    """Remaining time of this phase."""
    run_seconds_left: float | None = None
    """Remaining time of the whole run, if it has a time limit."""
    tok_s: float
    loss: float | None = None
    acceptance: float | None = None
    """Validation: expected acceptance under the coupled rule at temperature 1, lower bound."""


class DistillFinished(msgspec.Struct, frozen=True, kw_only=True, tag="finished"):
    """The final event: the figures of the drafter in `distill.json`."""

    out: str
    complete: bool
    """False if the run was interrupted and can be resumed."""
    figures: dict[str, object] = {}


DistillEvent = DistillNote | DistillProgress | DistillFinished
