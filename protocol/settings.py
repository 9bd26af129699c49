"""What the supervisor tells each child at its start: frozen, typed, unknown keys rejected.

A child gets its settings as one JSON argument. Defaults live here and nowhere else; the
command line reads them from here (`launch/config.py`).
"""

import shutil
from typing import Annotated, Literal, TypeVar

import msgspec

from protocol.errors import UsageError

BackendName = Literal["mlx", "ngram"]
BACKENDS: tuple[BackendName, ...] = ("mlx", "ngram")


class _Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pass


class ChildSettings(_Settings, frozen=True, kw_only=True):
    """What every child is told."""

    lifeline: int
    """File descriptor that reaches end of file when the supervisor is gone."""
    cores: list[int] = []
    """Linux: the cores this process is pinned to; empty leaves it free."""

    def on_orphaned(self) -> None:
        """Clean up because the supervisor cannot."""


class ServiceSettings(ChildSettings, frozen=True, kw_only=True):
    """What a verifier and a drafter have in common."""

    address: str
    """Where the orchestrator listens for services."""
    model: str = ""
    """Folder of the model; empty for a backend that needs none."""
    threads: Annotated[int, msgspec.Meta(ge=1)] = 1
    """Threads of the BLAS on Linux."""
    prefill_step_size: Annotated[int, msgspec.Meta(ge=1)] = 512


class VerifierSettings(ServiceSettings, frozen=True, kw_only=True):
    """One verifier process."""


class DrafterSettings(ServiceSettings, frozen=True, kw_only=True):
    """One drafter process."""

    backend: BackendName


class ReferenceSettings(_Settings, frozen=True, kw_only=True):
    """The process that runs mlx-lm itself, for comparison."""

    model: str
    draft_model: str = ""
    threads: Annotated[int, msgspec.Meta(ge=1)] = 1


class OrchestratorSettings(ChildSettings, frozen=True, kw_only=True):
    """The orchestrator process."""

    services_address: str
    clients_address: str
    run_dir: str
    """Private folder of this stack's sockets and logs."""
    model: str
    """Folder of the target model, for its tokenizer and chat template."""
    concurrency: Annotated[int, msgspec.Meta(ge=1)] = 1
    """Requests decoded at the same time; others wait in line."""
    max_waiting: Annotated[int, msgspec.Meta(ge=0)] = 64
    draft_timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 5.0
    """Longest wait for a draft while the target idles; then it decodes plainly."""
    verify_timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 600.0
    """Longest wait for the verifier's answer, prefill included, before the request fails."""

    def on_orphaned(self) -> None:
        """Remove the run folder, which the supervisor can no longer do."""
        shutil.rmtree(self.run_dir, ignore_errors=True)


S = TypeVar("S", bound=_Settings)


def encode_settings(settings: _Settings) -> str:
    """The settings as the one JSON argument of a child."""
    return msgspec.json.encode(settings).decode()


def decode_settings(argument: str, kind: type[S]) -> S:
    """The settings in a child's argument; raises UsageError naming the field that is wrong."""
    try:
        return msgspec.json.decode(argument, type=kind)
    except msgspec.DecodeError as error:
        raise UsageError(f"{kind.__name__}: {error}") from error
