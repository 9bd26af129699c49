"""The default pair: a small target that is downloaded once, and the drafter shipped with ssd."""

import importlib.resources
from pathlib import Path

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
