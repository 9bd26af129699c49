"""How a model writes calls of tools: the marks around a call, and who reads what is between.

Most write <tool_call>, which `tools` reads itself. For the others mlx-lm has parsers, one
module each, with their marks. Those modules need nothing of mlx-lm but each other, so they
are loaded without it: a gateway computes nothing and carries no MLX.
"""

import importlib
import importlib.util
import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

_log = logging.getLogger(__name__)

_PACKAGE = "ssd_tool_parsers"
_COMMON = "<tool_call>"


class ToolFormat(NamedTuple):
    """The marks of a call, and what reads it."""

    start: str = _COMMON
    end: str = "</tool_call>"
    """Empty: a call goes on to the end of the answer."""
    parse: Callable[[str, list[dict[str, Any]]], Any] | None = None
    """Text between the marks and tools -> name and arguments, or several; None: our own."""


def find_tool_format(folder: Path) -> ToolFormat:
    """The format of the model in this folder.

    Its `tool_parser_type` decides if it has one, as with mlx-lm; otherwise the start mark that
    its chat template mentions.
    """
    config = _read(folder / "tokenizer_config.json")
    template = _template(folder, config)
    parsers = _parsers()
    named = config.get("tool_parser_type")
    if isinstance(named, str):
        if named in parsers:
            return _format(parsers[named])
        _log.warning("the tool parser %r is not among mlx-lm's: %s", named, ", ".join(parsers))
    marked = [p for p in parsers.values() if p.tool_call_start in template]
    special = [p for p in marked if p.tool_call_start != _COMMON]
    # GLM shares the common mark, and is known by what stands within.
    within = [p for p in marked if "glm" in p.__name__ and "<arg_key>" in template]
    longest = max(special or within, key=lambda p: len(p.tool_call_start), default=None)
    return ToolFormat() if longest is None else _format(longest)


def _format(parser: Any) -> ToolFormat:
    own = parser.tool_call_start == _COMMON and "glm" not in parser.__name__
    parse = None if own else parser.parse_tool_call
    return ToolFormat(parser.tool_call_start, parser.tool_call_end, parse)


def _parsers() -> dict[str, Any]:
    """mlx-lm's parsers by name; those that cannot be loaded are left out, and logged."""
    found = importlib.util.find_spec("mlx_lm")
    places = list(found.submodule_search_locations or []) if found else []
    folder = Path(places[0], "tool_parsers") if places else None
    if folder is None or not folder.is_dir():
        _log.warning("this mlx-lm has no tool parsers; only <tool_call> is understood")
        return {}
    package = ModuleType(_PACKAGE)
    package.__path__ = [str(folder)]
    sys.modules[_PACKAGE] = package
    parsers = {}
    for name in sorted(path.stem for path in folder.glob("[a-z]*.py")):
        try:
            module: Any = importlib.import_module(f"{_PACKAGE}.{name}")
            if module.tool_call_start:
                parsers[name] = module
        except (ImportError, AttributeError, SyntaxError) as error:
            _log.warning("the tool parser %r cannot be loaded: %s", name, error)
    return parsers


def _template(folder: Path, config: dict[str, Any]) -> str:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    return json.dumps(config.get("chat_template") or "", ensure_ascii=False)


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        _log.warning("%s cannot be read: %s", path, error)
        return {}
    return content if isinstance(content, dict) else {}
