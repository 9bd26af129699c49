"""Locations: run folders, models, keys."""

import os
import tempfile
from pathlib import Path


def run_base() -> Path:
    """Return the folder of all run directories: SSD_RUN_DIR, or one per user in /tmp."""
    chosen = os.environ.get("SSD_RUN_DIR")
    return Path(chosen) if chosen else Path(tempfile.gettempdir()) / f"ssd-{os.getuid()}"


def cache_dir() -> Path:
    """Return the folder of converted models: SSD_CACHE_DIR, or ~/.cache/ssd."""
    chosen = os.environ.get("SSD_CACHE_DIR")
    return Path(chosen) if chosen else Path.home() / ".cache" / "ssd"


def conversions_dir() -> Path:
    """Return the folder of converted GGUF files, which are named by their content."""
    return cache_dir() / "gguf"


def keys_dir() -> Path:
    """Return the folder of our and the trusted keys: SSD_KEYS_DIR, or ~/.config/ssd/keys."""
    chosen = os.environ.get("SSD_KEYS_DIR")
    return Path(chosen) if chosen else Path.home() / ".config" / "ssd" / "keys"


def ollama_dirs() -> list[Path]:
    """Return Ollama's model folders: OLLAMA_MODELS, or the user's and its service's."""
    if chosen := os.environ.get("OLLAMA_MODELS"):
        return [Path(chosen)]
    return [Path.home() / ".ollama" / "models", Path("/usr/share/ollama/.ollama/models")]
