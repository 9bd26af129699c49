"""Prompts and texts from a file, to be used besides ours and the target's own."""

import json
from pathlib import Path
from typing import NamedTuple

from prompts import Prompt, Sources
from tasks import File


class Corpus(NamedTuple):
    """Prompts to be answered, and texts to be read."""

    prompts: list[Prompt]
    sources: Sources


def read_corpus(path: Path | None) -> Corpus:
    """Read JSON lines: `prompt` and `category`, `passage`, or `file` and `language`."""
    corpus = Corpus([], Sources([], []))
    if path is None:
        return corpus
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            found = json.loads(line)
            if "prompt" in found:
                corpus.prompts.append(Prompt(found["prompt"], found["category"]))
            elif "file" in found:
                corpus.sources.files.append(File(found["language"], found["file"]))
            else:
                corpus.sources.passages.append(found["passage"])
        except (ValueError, KeyError, TypeError) as error:
            raise SystemExit(f"{path}, line {number}: {error!r}; see read_corpus") from error
    return corpus
