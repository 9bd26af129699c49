"""The models that a server offers: a TOML file with a table per model, or a folder of models."""

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from launch.models.programs import command_of
from launch.settings.settings import StackSettings, check_numbers
from protocol.errors import UsageError
from protocol.messages import SwapDrafter
from protocol.settings import BACKENDS
from protocol.validation import describe

_OF_THE_SERVER = frozenset(
    {
        "http", "host", "port", "api_key", "allowed_hosts", "allowed_origins", "max_body_bytes",
        "strict", "rate_limit", "preset", "models", "idle_unload", "memory_bytes", "log_level",
    }
)  # fmt: skip
"""Settings that are common to all models."""

_OF_ONE_MODEL = frozenset(
    {"model", "adapter_path", "draft_model", "draft_backend", "draft_command", "draft_lines",
     "draft_server", "draft_server_key", "prompt_cache_file"}
)  # fmt: skip
"""Settings that cannot be common to several models."""

_LONGEST_SLUG = 16
"""The path of a Unix socket is limited to about a hundred characters."""
_UNFIT = re.compile(r"[^A-Za-z0-9]+")


class DrafterTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A drafter that requests may name: settings as for a stack."""

    draft_backend: str = ""
    """Empty: inferred from the other settings (program, server, model or lookup)."""
    draft_model: str = ""
    draft_command: str = ""
    draft_lines: bool = False
    draft_server: str = ""
    draft_server_key: str = ""

    def swap(self) -> SwapDrafter:
        """Return the command that makes it the drafter of a running stack.

        Raises:
            UsageError: there is no such backend or program.
        """
        backend = self.draft_backend or _guess_backend(self)
        if backend not in BACKENDS:
            raise UsageError(f"unknown drafter backend {backend!r}; known: {', '.join(BACKENDS)}")
        return SwapDrafter(
            backend=backend,
            model=self.draft_model,
            command=list(command_of(self.draft_command)),
            lines=self.draft_lines,
            server=self.draft_server,
            server_key=self.draft_server_key,
        )


class _ModelTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Fields of a model's table besides the settings of its stack."""

    aliases: list[str] = []
    keep_loaded: bool = False
    drafters: dict[str, DrafterTable] = {}


@dataclass(frozen=True, kw_only=True)
class ModelEntry:
    """One model of a server."""

    name: str
    """Its name in requests."""
    aliases: tuple[str, ...] = ()
    keep_loaded: bool = False
    """True if it is loaded with the server, and stays loaded."""
    drafters: Mapping[str, DrafterTable]
    """Drafters that requests may name, besides the initial one."""
    settings: StackSettings
    slug: str
    """Short form of its name, for folders."""


def read_models(path: Path, common: StackSettings) -> list[ModelEntry]:
    """Read the models of a file, or of a folder of model folders.

    Args:
        path: a TOML file, or a folder.
        common: defaults for the models' tables.

    Raises:
        UsageError: it cannot be read, names no model, or a table is wrong, naming the table.
    """
    if misplaced := sorted(_list_given(common) & _OF_ONE_MODEL):
        raise UsageError(
            f"{misplaced[0]!r} is for one model; with --models it belongs in that model's table"
        )
    tables = _read_folder(path) if path.is_dir() else _read_file(path)
    if not tables:
        raise UsageError(f"{str(path)!r} names no model")
    slugs = _make_slugs(list(tables))
    entries = [
        _parse_table(name, table, common, slug, f"{str(path)!r}, model {name!r}")
        for (name, table), slug in zip(tables.items(), slugs, strict=True)
    ]
    _refuse_duplicates(entries, path)
    return entries


def _list_given(common: StackSettings) -> set[str]:
    defaults = StackSettings()
    return {
        field.name
        for field in msgspec.structs.fields(StackSettings)
        if getattr(common, field.name) != getattr(defaults, field.name)
    }


def _read_file(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"the models file {str(path)!r} cannot be read: {error}") from error


def _read_folder(path: Path) -> dict[str, Any]:
    """Return every model folder below: `NAME`, or `OWNER/NAME` as in LM Studio."""
    configs = [*path.glob("*/config.json"), *path.glob("*/*/config.json")]
    folders = sorted(file.parent for file in configs if any(file.parent.glob("*.safetensors")))
    return {
        folder.relative_to(path).as_posix(): {"model": str(folder.resolve())} for folder in folders
    }


def _parse_table(name: str, table: Any, common: StackSettings, slug: str, where: str) -> ModelEntry:
    if not isinstance(table, dict):
        raise UsageError(f"{where}: a model is a table, as in [{name!r}]; this is a value")
    ours = {field.name for field in msgspec.structs.fields(_ModelTable)}
    if misplaced := sorted(table.keys() & _OF_THE_SERVER):
        raise UsageError(f"{where}: {misplaced[0]!r} is for all models; give it to the server")
    shared = {key: value for key, value in table.items() if key not in ours}
    try:
        model = msgspec.convert({k: v for k, v in table.items() if k in ours}, _ModelTable)
        settings = msgspec.convert(msgspec.to_builtins(common) | shared, StackSettings)
        check_numbers(settings)
    except msgspec.ValidationError as error:
        raise UsageError(f"{where}: {describe(error)}") from error
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from error
    for drafter, described in model.drafters.items():
        try:
            described.swap()
        except UsageError as error:
            raise UsageError(f"{where}, drafter {drafter!r}: {error}") from error
    return ModelEntry(
        name=name,
        aliases=tuple(model.aliases),
        keep_loaded=model.keep_loaded,
        drafters=model.drafters,
        settings=msgspec.structs.replace(settings, http=False),
        slug=slug,
    )


def _make_slugs(names: list[str]) -> list[str]:
    """Return short distinct names."""
    slugs: list[str] = []
    for number, name in enumerate(names):
        slug = _UNFIT.sub("-", name.rsplit("/", 1)[-1]).strip("-")[:_LONGEST_SLUG] or "model"
        slugs.append(slug if slug not in slugs else f"{slug[: _LONGEST_SLUG - 4]}-{number}")
    return slugs


def _refuse_duplicates(entries: list[ModelEntry], path: Path) -> None:
    names: set[str] = set()
    for name in _names(entries):
        if name in names:
            raise UsageError(f"{str(path)!r}: two models are called {name!r}")
        names.add(name)


def _names(entries: list[ModelEntry]) -> Iterator[str]:
    for entry in entries:
        yield entry.name
        yield from entry.aliases


def _guess_backend(table: DrafterTable) -> str:
    if table.draft_command:
        return "stdio"
    if table.draft_server:
        return "remote"
    return "mlx" if table.draft_model else "ngram"
