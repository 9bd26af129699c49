"""`ssd generate`: the flags of `mlx_lm.generate`."""

import ast
import importlib.util
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from launch.commands import generate
from protocol.errors import UsageError


def list_mlx_flags() -> list[str]:
    """Those that its parser declares."""
    spec = importlib.util.find_spec("mlx_lm")
    assert spec is not None
    assert spec.submodule_search_locations
    source = Path(spec.submodule_search_locations[0], "generate.py").read_text(encoding="utf-8")
    return [
        argument.value
        for call in ast.walk(ast.parse(source))
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "parser.add_argument"
        for argument in call.args
        if isinstance(argument, ast.Constant) and str(argument.value).startswith("-")
    ]


def test_every_flag_of_mlx_lm_is_known() -> None:
    """It is one of ours, or a sentence says what to do instead."""
    ours = {name for option in generate.command.params for name in option.opts}
    flags = list_mlx_flags()
    assert "--prefill-response" in flags
    for flag in flags:
        if flag not in ours:
            with pytest.raises(UsageError, match=f"{flag} of mlx_lm.generate is not here"):
                generate.command.make_context("generate", ["hello", flag, "1"])


def test_their_values_act_as_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raw prompts, a begun answer, variables of the template, a seed that is drawn."""
    asked: list[Any] = []

    def stop(settings: object, *_: object) -> None:
        raise UsageError("no stack is started here")

    def note(options: dict[str, Any], *, details: bool) -> Any:
        asked.append((answer_options(options, details=details), details))
        return asked[-1][0]

    answer_options = generate._answer_options
    monkeypatch.setattr(generate, "session", stop)
    monkeypatch.setattr(generate, "_answer_options", note)
    words = ["-p", "hi", "--ignore-chat-template", "--prefill-response", "So", "--seed", "-1"]
    more = ["--chat-template-config", '{"a": 1}', "--verbose", "False"]
    filters = ["--top-p", "0", "--min-p", "1", "--repetition-penalty", "0", "--temp", "2"]
    CliRunner().invoke(generate.command, [*words, *more, *filters])
    [((choice, options), details)] = asked
    assert (options.is_raw, details, choice.seed) == (True, False, None)
    template = options.template
    assert (template.answer_start, template.template_options) == ("So", {"a": 1})
    assert choice.explicit["top_p"] < 1e-3
    assert choice.explicit["min_p"] > 0.999
    assert choice.logits_options == {"repetition_penalty": 1.0}
    with pytest.raises(UsageError, match="not a JSON object"):
        answer_options({**_defaults(), "chat_template_config": "[1]"}, details=False)


def _defaults() -> dict[str, Any]:
    return dict(generate.command.make_context("generate", ["hello"]).params)
