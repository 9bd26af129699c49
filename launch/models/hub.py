"""Resolve a model's name to its folder: local, or downloaded from the hub."""

from pathlib import Path

from launch.models.own_drafters import DEFAULT, default_target, require_default
from launch.settings.paths import cache_dir
from protocol.errors import ModelError, RuntimeFailure, UsageError

HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja"]
"""Files of a hub model to download."""
_LONGEST = 200
"""Most characters of an error that are shown."""


def resolve(reference: str) -> Path:
    """Return the folder of a model: a folder, a GGUF file, a name in a cache, or a hub name.

    A GGUF file is converted, and a hub model (`owner/name`) downloaded, if needed.
    """
    if reference == DEFAULT:
        return require_default(default_target())
    folder = Path(reference).expanduser()
    cached = cache_dir() / "models" / reference
    if folder.is_dir() or ("/" not in reference and cached.is_dir()):
        return (folder if folder.is_dir() else cached).resolve()
    # Imported only now: a folder's name never needs it.
    from launch.models.gguf_models import convert_once, find_named, is_gguf  # noqa: PLC0415

    if is_gguf(folder):
        return convert_once(folder)
    if (file := find_named(reference)) is not None:
        return convert_once(file)
    if folder.exists():
        raise ModelError(f"{reference!r} is neither a folder in mlx-lm's format nor a GGUF file")
    if reference.startswith((".", "/", "~")) or reference.count("/") != 1:
        raise ModelError(
            f"no model at {reference!r}; give a folder, a GGUF file or a hub name (OWNER/NAME)"
        )
    return download(reference)


def download(name: str) -> Path:
    """Download the hub model `owner/name` and return its folder; the library shows progress.

    Cached files are not downloaded again.

    Raises:
        UsageError: the name is not a valid hub name.
        ModelError: there is no such model, or access to it is denied.
        RuntimeFailure: the hub cannot be reached, or the download broke off.
    """
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise UsageError(f"{name!r} is not a hub name; those look like OWNER/NAME")
    # Heavy, and needed only here.
    from huggingface_hub import constants, errors, snapshot_download  # noqa: PLC0415

    try:
        return Path(snapshot_download(name, allow_patterns=HUB_PATTERNS))
    except errors.HFValidationError as error:
        raise UsageError(f"{name!r} is not a valid model name: {_first_line(error)}") from error
    except errors.GatedRepoError as error:
        raise ModelError(
            f"{name!r} is given only to those who accept its terms: do so on its page on the hub, "
            "then set HF_TOKEN to your token"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelError(
            f"the hub has no model {name!r}, or it is private; a private one needs HF_TOKEN"
        ) from error
    # The underlying library, and so its exceptions, change with its version.
    except Exception as error:
        if constants.HF_HUB_OFFLINE:
            raise RuntimeFailure(
                f"{name!r} is not in the cache, and HF_HUB_OFFLINE forbids downloading it"
            ) from error
        raise RuntimeFailure(
            f"cannot download {name!r}; is the hub reachable from here? "
            f"Repeating the command resumes the download. ({_first_line(error)})"
        ) from error


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:_LONGEST]
