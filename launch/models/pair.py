"""The models of a stack: a target, and its drafter."""

import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from launch.models.coreml_models import find_converted, require_converted
from launch.models.default_pair import DEFAULT, default_drafter, default_target, require_default
from launch.models.hub import resolve
from launch.settings.machine import require_mlx
from launch.settings.settings import StackSettings
from protocol.errors import ModelError, UsageError
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
        if name != "ngram" and not model and self.model != str(default_target()):
            raise UsageError("give --draft-model: a model with the target's tokenizer")
        folder = drafter_folder(name, model)
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
    return Pair(str(target), "", "ngram", adapter=adapter_folder(settings)).with_drafter(
        backend,
        settings.draft_model,
        command_of(settings.draft_command),
        lines=settings.draft_lines,
        server=server_of(settings.draft_server, settings.draft_server_key, settings.key),
    )


def server_of(address: str, key: str, own_key: str) -> "RemoteServer | None":
    """Return the draft server that the settings name, if any; see `keyring.remote_server_of`."""
    if not address and not key:
        return None
    from launch.keyring import remote_server_of  # noqa: PLC0415

    return remote_server_of(address, key, own_key)


def adapter_folder(settings: StackSettings) -> str:
    """Return the folder of the target's adapter; empty without one.

    Raises:
        ModelError: it does not contain an adapter.
        UsageError: the target's configuration does not support adapters.
    """
    if not settings.adapter_path:
        return ""
    if settings.target_ranks > 1 or settings.hosts or settings.prefill != "mlx":
        raise UsageError("--adapter-path needs the whole target under MLX: no ranks, no CoreML")
    from protocol.adapter import ADAPTER_FILES  # noqa: PLC0415

    folder = Path(settings.adapter_path).expanduser().resolve()
    for file in ADAPTER_FILES:
        if not (folder / file).is_file():
            raise ModelError(f"the adapter folder {str(folder)!r} has no {file}")
    return str(folder)


def drafter_folder(backend: BackendName, model: str) -> str:
    """Return the folder of the model for one of our backends; empty if it needs none.

    Raises:
        ModelError: the model does not exist.
        UsageError: the backend has no model.
    """
    if backend == "ngram":
        if model:
            raise UsageError("the ngram backend takes no --draft-model")
        return ""
    named = model and model != DEFAULT
    folder = resolve(model) if named else require_default(default_drafter())
    return str(require_converted(folder) if backend == "coreml" else folder)


def _recognise(backend: BackendName, folder: str, target: str) -> BackendName:
    """Return the backend for a folder: published heads have their own.

    Raises:
        ModelError: the head is not for this target.
        UsageError: a head is requested, and the folder does not contain one.
    """
    if backend not in {"mlx", "head"} or (backend == "mlx" and folder == str(default_drafter())):
        return backend
    from protocol.heads import describe_head  # noqa: PLC0415  # for named models only

    if describe_head(Path(folder), Path(target)) is not None:
        return "head"
    if backend == "head":
        raise UsageError(
            f"{folder!r} holds no head of a known format: EAGLE-3, MTP, DFlash, DFlash 2 or DSpark"
        )
    return backend


def command_of(text: str) -> tuple[str, ...]:
    """Split a draft command into words and find its program; raise UsageError if there is none."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"cannot parse --draft-command {text!r}: {error}") from error
    if not words:
        return ()
    program = shutil.which(words[0])
    if program is None:
        raise UsageError(f"--draft-command: no program {words[0]!r}")
    return (str(Path(program).absolute()), *words[1:])


def _automatic(settings: StackSettings, target: Path) -> str:
    """Resolve `auto`; a Mac drafts on the Neural Engine if the model is converted."""
    if settings.draft_command:
        return "stdio"
    if settings.draft_server:
        return "remote"
    if not settings.draft_model and target != default_target():
        return "ngram"
    named = settings.draft_model and settings.draft_model != DEFAULT
    drafter = resolve(settings.draft_model) if named else default_drafter()
    converted = find_converted(drafter)
    on_mac = sys.platform == "darwin" and settings.draft_device == ""
    return "coreml" if converted == drafter or (converted is not None and on_mac) else "mlx"
