"""Files of prompts, one JSON object a line, as every verb reads them."""

from pathlib import Path

import msgspec

from protocol.errors import UsageError

PromptId = str | int


class Prompt(msgspec.Struct, frozen=True):
    """One line; other fields are allowed and ignored, since public prompt sets have many."""

    prompt: str
    id: PromptId = ""
    category: str = ""


def read_prompts(path: Path) -> list[Prompt]:
    """The prompts of a JSONL file; raises UsageError naming the line that is wrong."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the prompts file {str(path)!r} cannot be read: {error}") from error
    prompts = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            prompt = msgspec.json.decode(line, type=Prompt)
        except msgspec.DecodeError as error:
            raise UsageError(f"{str(path)!r}, line {number}: {error}") from error
        if not prompt.prompt.strip():
            raise UsageError(f"{str(path)!r}, line {number}: the prompt is empty")
        prompts.append(prompt)
    if not prompts:
        raise UsageError(f"the prompts file {str(path)!r} has no prompts")
    return prompts
