"""Drafters that travel with ssd, each for one target of `ssd models add`."""

import importlib.resources
from pathlib import Path

from launch.settings.paths import cache_dir
from protocol.errors import ModelError

DEFAULT = "default"
"""Name of the default target and its drafter for --model and --draft-model."""
TARGET_NAME = "smollm2-135m-instruct"
_DRAFTERS = {
    TARGET_NAME: ("smollm2-135m-draft", "default_drafter"),
    "coder": ("coder-drafter", "coder_drafter"),
}
"""The drafter's name and the folder of its shipped weights, by the target's name."""


def default_target() -> Path:
    """Return the folder of the default target."""
    return cache_dir() / "models" / TARGET_NAME


def default_drafter() -> Path:
    """Return the folder of the default target's drafter."""
    return cache_dir() / "models" / _DRAFTERS[TARGET_NAME][0]


def find_own_drafter(target: Path) -> Path | None:
    """Return the folder of the drafter made for a target of `ssd models add`, if one was made."""
    is_ours = target.parent.resolve() == (cache_dir() / "models").resolve()
    names = is_ours and _DRAFTERS.get(target.name)
    return target.with_name(names[0]) if names else None


def find_shipped_weights(target: Path) -> Path:
    """Return the folder of a drafter's weights as shipped, without the embedding."""
    return Path(str(importlib.resources.files("launch.models"))) / _DRAFTERS[target.name][1]


def require_default(folder: Path) -> Path:
    """Return the folder; raise ModelError if the default pair has not been set up."""
    if not (folder / "model.safetensors").is_file():
        raise ModelError("the default pair is not set up yet; run `ssd models add default` once")
    return folder
