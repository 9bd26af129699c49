"""Tiny models converted to CoreML, and the reference runtime over them."""

import atexit
import json
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from protocol.jobs.convert import ConvertSettings
from protocol.messages import Tokens
from services.coreml.convert.convert import convert
from services.coreml.manifest import read_manifest
from services.coreml.model import ConvertedModel
from services.coreml.runtime.executor import ReferenceExecutor
from services.coreml.runtime.program import Precision
from tests.support.tiny_models import write_tiny_model

SLOTS, BRANCHES, CHUNK = 128, 8, 16

HEAD: Tokens = [*range(0, 288, 3), 1]
"""The ids of a trimmed head."""


@cache
def _base() -> Path:
    base = Path(tempfile.mkdtemp(prefix="ssd-coreml-"))
    atexit.register(shutil.rmtree, base, ignore_errors=True)
    return base


@cache
def source_folder(family: str, *, trimmed: bool = False, layers: int = 3) -> Path:
    """A tiny model; `trimmed` gives it a head of `HEAD`."""
    folder = _base() / f"{family}-{trimmed}-{layers}"
    write_tiny_model(folder, family, layers=layers)
    if trimmed:
        (folder / "draft_head.json").write_text(json.dumps(HEAD), encoding="utf-8")
    return folder


def settings_for(source: Path, out: Path, **options: Any) -> ConvertSettings:
    """A conversion with small shapes."""
    shapes = {"context": SLOTS, "branches": BRANCHES, "chunk": CHUNK}
    return ConvertSettings(lifeline=0, model=str(source), out=str(out), **{**shapes, **options})


@cache
def converted_folder(
    family: str, *, trimmed: bool = False, layers: int = 3, options: tuple[Any, ...] = ()
) -> Path:
    """A converted tiny model; `options` are pairs of `ConvertSettings`. Must not be changed."""
    source = source_folder(family, trimmed=trimmed, layers=layers)
    name = "-".join(str(part) for option in options for part in option)
    out = _base() / f"{source.name}-{name}-coreml"
    if not out.exists():
        convert(settings_for(source, out, **dict(options)), out, lambda what, share: None)
    return out


@cache
def converted_model(folder: Path, precision: Precision = "float32") -> ConvertedModel:
    """The folder's model on the reference runtime."""
    return ConvertedModel(folder, ReferenceExecutor(folder, read_manifest(folder), precision))
