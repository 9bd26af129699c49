"""Parts of a pair that few have: the target's adapter, and a program that drafts."""

import shlex
import shutil
from pathlib import Path

from launch.settings.settings import StackSettings
from protocol.adapter import ADAPTER_FILES
from protocol.errors import ModelError, UsageError


def adapter_folder(settings: StackSettings) -> str:
    """Return the folder of the target's adapter; empty without one.

    Raises:
        ModelError: it does not contain an adapter.
        UsageError: the target's configuration does not support adapters.
    """
    if not settings.adapter_path:
        return ""
    if settings.target_ranks > 1 or settings.hosts or settings.prefill != "mlx":
        raise UsageError("--adapter-path needs the whole target under MLX: no ranks, no CoreML")
    folder = Path(settings.adapter_path).expanduser().resolve()
    for file in ADAPTER_FILES:
        if not (folder / file).is_file():
            raise ModelError(f"the adapter folder {str(folder)!r} has no {file}")
    return str(folder)


def command_of(text: str) -> tuple[str, ...]:
    """Split a draft command into words and find its program; raise UsageError if there is none."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"cannot parse --draft-command {text!r}: {error}") from error
    if not words:
        return ()
    program = shutil.which(words[0])
    if program is None:
        raise UsageError(f"--draft-command: no program {words[0]!r}")
    return (str(Path(program).absolute()), *words[1:])
