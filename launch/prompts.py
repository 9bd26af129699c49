"""Prompt files, one JSON object a line, in the format of all commands."""

import importlib.resources
from pathlib import Path

import msgspec
from msgspec import structs

from protocol.errors import UsageError
from protocol.validation import describe

PromptId = str | int


class Prompt(msgspec.Struct, frozen=True):
    """One prompt; unknown fields are ignored, since public prompt sets have many."""

    prompt: str
    id: PromptId = ""
    category: str = ""


def read_prompts(path: Path) -> list[Prompt]:
    """Read the prompts of a JSONL file; raise UsageError naming an invalid line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UsageError(f"cannot read the prompts file {str(path)!r}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"cannot read the prompts file {str(path)!r}: {error}") from error
    prompts = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            prompt = msgspec.json.decode(line, type=Prompt)
        except msgspec.ValidationError as error:
            raise UsageError(f"{str(path)!r}, line {number}: {describe(error)}") from error
        except msgspec.DecodeError as error:
            raise UsageError(f"{str(path)!r}, line {number}: {error}") from error
        if not prompt.prompt.strip():
            raise UsageError(f"{str(path)!r}, line {number}: the prompt is empty")
        prompts.append(prompt)
    if not prompts:
        raise UsageError(f"the prompts file {str(path)!r} is empty")
    return prompts


def own_prompts() -> Path:
    """Return the file of our small prompt set."""
    return Path(str(importlib.resources.files("launch.bench"))) / "prompts.jsonl"


def demo_prompts() -> Path:
    """Return the file of the four prompts of `ssd demo`."""
    return own_prompts().with_name("demo.jsonl")


def chosen_prompts(path: Path | None, limit: int) -> list[Prompt]:
    """Return the prompts of a file, or our small set, each with an id; evenly thinned to
    `limit`.
    """
    prompts = [
        prompt if prompt.id != "" else structs.replace(prompt, id=number)
        for number, prompt in enumerate(read_prompts(path or own_prompts()), start=1)
    ]
    step = max(1, len(prompts) // limit) if limit else 1
    return prompts[::step][: limit or None]
