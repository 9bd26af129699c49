"""The models of a stack: a target, and its drafter."""

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from launch.models.coreml_models import find_converted, require_converted
from launch.models.hub import resolve
from launch.models.own_drafters import (
    DEFAULT,
    default_drafter,
    default_target,
    find_own_drafter,
    require_default,
)
from launch.settings.machine import require_mlx
from launch.settings.settings import StackSettings
from protocol.errors import UsageError
from protocol.settings import BACKENDS, BackendName

if TYPE_CHECKING:
    from launch.keyring import RemoteServer


@dataclass(frozen=True)
class Pair:
    """A target and its drafter, as folders."""

    model: str
    draft_model: str
    """Empty for a backend without a model."""
    backend: BackendName
    command: tuple[str, ...] = ()
    """The program that drafts, for the stdio backend."""
    lines: bool = False
    """True if it speaks the line protocol."""
    server: "RemoteServer | None" = None
    """The draft server, for the remote backend."""
    adapter: str = ""
    """Folder of the target's LoRA adapter; empty without one."""

    @property
    def has_drafter(self) -> bool:
        """True if a process drafts; prompt lookup needs none."""
        return self.backend != "ngram"

    @property
    def drafts_with(self) -> str:
        """The drafting model, program or server, as shown to users."""
        return (
            self.draft_model
            or shlex.join(self.command)
            or (self.server.address if self.server else "")
        )

    def with_drafter(
        self,
        backend: str,
        model: str,
        command: Sequence[str] = (),
        *,
        lines: bool = False,
        server: "RemoteServer | None" = None,
    ) -> "Pair":
        """Return the same target with another drafter; raise UsageError or ModelError."""
        names: dict[str, BackendName] = {"none": "ngram", **{name: name for name in BACKENDS}}
        name = names.get(backend)
        if name is None:
            raise UsageError(f"unknown drafter backend {backend!r}; known: {', '.join(names)}")
        if (name == "remote") != (server is not None):
            raise UsageError(
                "the remote backend needs --draft-server, and no other backend takes it"
            )
        if server is not None:
            if model or command or lines:
                raise UsageError(
                    "a draft server has its own model: leave out --draft-model and --draft-command"
                )
            return Pair(self.model, "", "remote", server=server, adapter=self.adapter)
        if name == "stdio":
            if model:
                raise UsageError(
                    "the stdio backend takes no --draft-model; name the model in --draft-command"
                )
            if not command:
                raise UsageError("the stdio backend needs --draft-command")
            return Pair(self.model, "", name, tuple(command), lines, adapter=self.adapter)
        if command or lines:
            raise UsageError(f"--draft-command is for the stdio backend, not for {name}")
        folder = drafter_folder(name, model, Path(self.model))
        return Pair(self.model, folder, _recognise(name, folder, self.model), adapter=self.adapter)


def pair_of(settings: StackSettings) -> Pair:
    """Return the pair that these settings name; hub models are downloaded.

    Raises:
        ModelError: a model does not exist.
        UsageError: the backend and the models do not match, or MLX is not installed.
    """
    require_mlx()
    target = resolve(settings.model) if settings.model else require_default(default_target())
    backend: str = settings.draft_backend
    if backend == "auto":
        backend = _automatic(settings, target)
    if backend not in {"mlx", "head"} and settings.draft_device not in {"", "cpu"}:
        raise UsageError(f"the {backend} backend does not use MLX; leave out --draft-device")
    from launch.models.programs import adapter_folder, command_of  # noqa: PLC0415

    adapter = adapter_folder(settings) if settings.adapter_path else ""
    return Pair(str(target), "", "ngram", adapter=adapter).with_drafter(
        backend,
        settings.draft_model,
        command_of(settings.draft_command) if settings.draft_command else (),
        lines=settings.draft_lines,
        server=server_of(settings.draft_server, settings.draft_server_key, settings.key),
    )


def server_of(address: str, key: str, own_key: str) -> "RemoteServer | None":
    """Return the draft server that the settings name, if any; see `keyring.remote_server_of`."""
    if not address and not key:
        return None
    from launch.keyring import remote_server_of  # noqa: PLC0415

    return remote_server_of(address, key, own_key)


def drafter_folder(backend: BackendName, model: str, target: Path) -> str:
    """Return the folder of the model for one of our backends; empty if it needs none.

    Raises:
        ModelError: the model does not exist.
        UsageError: the backend has no model, or the target has no drafter and none is named.
    """
    if backend == "ngram":
        if model:
            raise UsageError("the ngram backend takes no --draft-model")
        return ""
    folder = _find_drafter(model, target)
    if folder is None:
        raise UsageError("give --draft-model: a model with the target's tokenizer")
    return str(require_converted(folder) if backend == "coreml" else folder)


def _find_drafter(model: str, target: Path) -> Path | None:
    """Return the folder of the named drafter, else the target's own; None if it has none."""
    if model == DEFAULT or (not model and target == default_target()):
        return require_default(default_drafter())
    if model:
        return resolve(model)
    drafter = find_own_drafter(target)
    return drafter if drafter and (drafter / "model.safetensors").is_file() else None


def _recognise(backend: BackendName, folder: str, target: str) -> BackendName:
    """Return the backend for a folder: published heads have their own.

    Raises:
        ModelError: the head is not for this target.
        UsageError: a head is requested, and the folder does not contain one.
    """
    is_own = Path(folder) == find_own_drafter(Path(target))
    if backend not in {"mlx", "head"} or (backend == "mlx" and is_own):
        return backend
    from protocol.heads import describe_head  # noqa: PLC0415  # for named models only

    if describe_head(Path(folder), Path(target)) is not None:
        return "head"
    if backend == "head":
        raise UsageError(
            f"{folder!r} holds no head of a known format: EAGLE-3, MTP, DFlash, DFlash 2 or DSpark"
        )
    return backend


def _automatic(settings: StackSettings, target: Path) -> str:
    """Resolve `auto`; a Mac drafts on the Neural Engine if the model is converted."""
    if settings.draft_command:
        return "stdio"
    if settings.draft_server:
        return "remote"
    drafter = _find_drafter(settings.draft_model, target)
    if drafter is None:
        return "ngram"
    converted = find_converted(drafter)
    on_mac = sys.platform == "darwin" and settings.draft_device == ""
    return "coreml" if converted == drafter or (converted is not None and on_mac) else "mlx"
