"""Prompts of a distillation, and its events: one JSON object a line on stdout."""

import msgspec

from protocol.messages import Token


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
