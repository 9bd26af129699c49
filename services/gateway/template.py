"""What a model's chat template and tokens say about its answers.

Read from the model folder, without `transformers`. The orchestrator renders prompts; here only
the question is answered how a prompt ends, because an answer may begin within a thought.
"""

import datetime
import json
import logging
from collections.abc import Mapping
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import jinja2
import msgspec
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

_log = logging.getLogger(__name__)

_PROBE = "What is the answer to this question?"


class _AddedToken(msgspec.Struct):
    content: str = ""
    special: bool = False


class _TokenizerFile(msgspec.Struct):
    """What is read of `tokenizer.json`, which may have many megabytes."""

    added_tokens: list[_AddedToken] = []


class ModelText:
    """One model folder's template and added tokens; a missing or broken file counts as empty."""

    def __init__(self, folder: Path | None = None) -> None:
        self.config: dict[str, Any] = {}
        self.template = ""
        self._tokenizer_file: Path | None = None
        if folder is not None:
            self.config = _read_json(folder / "tokenizer_config.json")
            self.template = _read_template(folder, self.config)
            self._tokenizer_file = folder / "tokenizer.json"

    @property
    def knows_tools(self) -> bool:
        """Whether its prompts can list tools."""
        return "tools" in self.template

    @cached_property
    def added_tokens(self) -> dict[str, bool]:
        """Tokens beside the vocabulary proper, and whether each is special (hidden in text)."""
        if self._tokenizer_file is None or not self._tokenizer_file.is_file():
            return {}
        try:
            data = self._tokenizer_file.read_bytes()
            tokens = msgspec.json.decode(data, type=_TokenizerFile).added_tokens
        except (OSError, msgspec.DecodeError) as error:
            _log.warning("%s cannot be read: %s", self._tokenizer_file, error)
            return {}
        return {token.content: token.special for token in tokens}

    def prompt_end(self, options: Mapping[str, Any]) -> str:
        """What the template puts between the user's last word and the answer.

        Empty if that cannot be found out.
        """
        encoded = msgspec.json.encode(options, order="sorted")
        return _render(self.template, ("user",), encoded).rpartition(_PROBE)[2]

    def accepts(self, *roles: str) -> bool:
        """Whether a conversation may have these roles, one after the other."""
        if not self.template:
            return True
        return _render(self.template, roles, b"{}").count(_PROBE) == len(roles)


@lru_cache(maxsize=256)
def _render(template: str, roles: tuple[str, ...], options: bytes) -> str:
    """A prompt in which each turn is the probe; empty if there is none."""
    if not template:
        return ""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = lambda value, **more: json.dumps(
        value, ensure_ascii=False, **more
    )
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    try:
        text = environment.from_string(template).render(
            messages=[{"role": role, "content": _PROBE} for role in roles],
            add_generation_prompt=True,
            **msgspec.json.decode(options),
        )
    # A template is a program of the model's makers: anything may go wrong in it.
    except Exception as error:  # noqa: BLE001
        _log.info("the chat template refuses the roles %s: %s", ", ".join(roles), error)
        return ""
    return text


def _raise_exception(message: str) -> None:
    """What chat templates call to refuse a conversation."""
    raise jinja2.TemplateError(message)


def _read_template(folder: Path, config: dict[str, Any]) -> str:
    file = folder / "chat_template.jinja"
    source: Any = config.get("chat_template")
    if file.is_file():
        source = file.read_text(encoding="utf-8")
    if isinstance(source, list):  # several named templates
        named = {entry.get("name"): entry.get("template") for entry in source}
        source = named.get("default")
    return source if isinstance(source, str) else ""


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        _log.warning("%s cannot be read: %s", path, error)
        return {}
    return content if isinstance(content, dict) else {}
