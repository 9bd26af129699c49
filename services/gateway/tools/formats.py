"""How a model writes tool calls: the marks around a call, and the parser of the text between.

Many models write JSON or XML within <tool_call>, which `reader` parses itself. For the others
mlx-lm has parsers, one module each, with their marks. Those modules import only each other, so they
are loaded without mlx-lm: a gateway computes nothing and does not depend on MLX.
"""

import importlib
import importlib.util
import logging
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from services.gateway.template import ModelText
from services.gateway.tools.calls import CALL_END, CALL_START

_log = logging.getLogger(__name__)

_PACKAGE = "ssd_tool_parsers"

Parser = Callable[[str, list[dict[str, Any]]], Any]
"""(text between the marks, tools) -> name and arguments, or a list of these."""


class ToolFormat(NamedTuple):
    """The marks of a call, and its parser."""

    start: str = CALL_START
    end: str = CALL_END
    """Empty if a call extends to the end of the answer."""
    parse: Parser | None = None
    """None for our own, for JSON and XML within <tool_call>."""
    has_inner_name: bool = False
    """True if the start mark is part of the call, as in `<function name=`."""


def find_tool_format(text: ModelText) -> ToolFormat:
    """Return the call format of a model.

    Its `tool_parser_type` decides if it has one, as with mlx-lm; otherwise the start mark in its
    chat template; otherwise a mark that is a token.
    """
    parsers = load_parsers()
    named = text.config.get("tool_parser_type")
    if isinstance(named, str):
        if named in parsers:
            return _make_format(parsers[named])
        _log.warning("the tool parser %r is not among mlx-lm's: %s", named, ", ".join(parsers))
    template = text.template
    candidates = [p for p in parsers.values() if p.tool_call_start in template]
    special = [p for p in candidates if p.tool_call_start != CALL_START]
    # GLM shares the common mark; the text inside identifies it.
    glm = [parsers["glm47"]] if "<arg_key>" in template and "glm47" in parsers else []
    by_token = [] if CALL_START in template else _find_by_tokens(text, parsers)
    chosen = max(special or glm or by_token, key=lambda p: len(p.tool_call_start), default=None)
    return ToolFormat() if chosen is None else _make_format(chosen)


def _find_by_tokens(text: ModelText, parsers: dict[str, Any]) -> list[Any]:
    """Return the format by added tokens: some conversions do not name the marks in the template."""
    tokens = text.added_tokens
    if {"<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"} <= tokens.keys():
        return [parsers["kimi_k3"]] if "kimi_k3" in parsers else []
    return [p for p in parsers.values() if {p.tool_call_start, p.tool_call_end} <= tokens.keys()]


def _make_format(parser: Any) -> ToolFormat:
    name = parser.__name__.rpartition(".")[2]
    own = name in ("json_tools", "qwen3_coder")
    parse = None if own else parser.parse_tool_call
    return ToolFormat(
        parser.tool_call_start, parser.tool_call_end, parse, parser.tool_call_start.endswith("=")
    )


@cache
def load_parsers() -> dict[str, Any]:
    """Load mlx-lm's parsers by name; those that cannot be loaded are skipped and logged."""
    spec = importlib.util.find_spec("mlx_lm")
    places = list(spec.submodule_search_locations or []) if spec else []
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
