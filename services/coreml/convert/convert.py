"""Convert a model folder."""

import platform
import shutil
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import numpy as np

from protocol.decoding.vocabulary import read_vocabulary
from protocol.jobs.convert import ConvertSettings
from services.coreml.convert import package
from services.coreml.convert.program import PackageOptions, build
from services.coreml.convert.source import Source
from services.coreml.convert.weights import fingerprint_of
from services.coreml.functions import functions_of, parts_of
from services.coreml.manifest import EMBEDDING, Manifest, Versions, write_manifest

Report = Callable[[str, float], None]
"""Called with the current activity and the share that is done."""

_COPIED = ("config.json", "tokenizer.json", "tokenizer_config.json")


def convert(settings: ConvertSettings, folder: Path, report: Report) -> Manifest:
    """Write the converted model into `folder`, which is created.

    Raises:
        ModelError: the model cannot be converted.
    """
    source = Source(Path(settings.model), settings.compression)
    vocabulary = read_vocabulary(source.folder)
    parts = parts_of(source.architecture.layers, settings.layers_per_part)
    manifest = Manifest(
        source=str(source.folder),
        source_fingerprint=fingerprint_of(source.folder),
        tokenizer_fingerprint=vocabulary.fingerprint,
        vocabulary_size=vocabulary.size,
        architecture=source.architecture,
        slots=settings.context,
        parts=parts,
        functions=functions_of(settings.branches, settings.chunk),
        width=settings.width,
        head_size=source.head_size,
        head_ids=[] if source.head_ids is None else source.head_ids.tolist(),
        state_write=settings.state_write,
        compression=settings.compression,
        versions=Versions(version("coremltools"), np.__version__, platform.python_version()),
    )
    folder.mkdir(parents=True)
    np.save(folder / EMBEDDING, source.embedding().astype(np.float16))
    for name in _COPIED:
        if (source.folder / name).is_file():
            shutil.copyfile(source.folder / name, folder / name)
    _write_parts(source, manifest, folder, report)
    write_manifest(folder, manifest)
    return manifest


def _write_parts(source: Source, manifest: Manifest, folder: Path, report: Report) -> None:
    """Write each part: build it, then lower it, which takes three times as long."""
    count = len(manifest.parts)
    for number, part in enumerate(manifest.parts):
        report("building", number / count)
        plan = PackageOptions(part, manifest.slots, manifest.width, manifest.state_write)
        program = build(source, plan, manifest.functions)
        report("lowering", (number + 0.25) / count)
        package.save(program, folder / part.file)
    report("saved", 1.0)
