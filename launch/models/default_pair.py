"""The default pair: a small target that is downloaded once, and the drafter shipped with ssd."""

import importlib.resources
from pathlib import Path

from launch.models.gguf_models import produce
from launch.models.registry import Report, add_from_registry, read_registry
from launch.settings.machine import require_mlx
from launch.settings.paths import cache_dir
from protocol.errors import ModelError

DEFAULT = "default"
"""Name of its two models for --model and --draft-model."""
TARGET_NAME = "smollm2-135m-instruct"
DRAFT_NAME = "smollm2-135m-draft"


def default_target() -> Path:
    """Return the folder of the default pair's target."""
    return cache_dir() / "models" / TARGET_NAME


def default_drafter() -> Path:
    """Return the folder of the default pair's drafter."""
    return cache_dir() / "models" / DRAFT_NAME


def require_default(folder: Path) -> Path:
    """Return the folder; raise ModelError if the default pair has not been set up."""
    if not (folder / "model.safetensors").is_file():
        raise ModelError("the default pair is not set up yet; run `ssd models add default` once")
    return folder


def drafter_weights() -> Path:
    """Return the default drafter's weights, as shipped with this project (without embeddings)."""
    return Path(str(importlib.resources.files("launch.models"))) / "default_drafter"


def add_default(report: Report) -> None:
    """Set up the default pair: download the target, convert it, assemble the drafter.

    Existing files are kept; an interrupted run leaves nothing half-written.

    Raises:
        UsageError: MLX is not installed.
        ModelError: the weights cannot be converted.
        RuntimeFailure: they cannot be downloaded.
    """
    require_mlx()
    target = add_from_registry(read_registry()[TARGET_NAME], report)
    produce(default_drafter(), "services.tools.build_drafter", str(drafter_weights()), str(target))
