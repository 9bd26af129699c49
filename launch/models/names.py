"""Names of models, for users."""

import json
from functools import cache
from pathlib import Path

from launch.settings.paths import conversions_dir


@cache
def name_of_folder(folder: str) -> str:
    """Return the name of a model's folder; of a converted GGUF file, that of the file."""
    path = Path(folder)
    if path.parent.resolve() != conversions_dir().resolve():
        return path.name
    try:
        report = json.loads((path / "gguf.json").read_text(encoding="utf-8"))
        source, title = Path(report["source"]).name, str(report["name"])
    except (OSError, ValueError, KeyError, TypeError):
        return path.name
    return title if title and source.startswith("sha256-") else source  # Ollama names by content
