"""A table: all that a request may ask of an answer, for the template of each family.

What a cell allows is read as it was meant; what it does not allow the grammar does not take; what
cannot work is refused with a sentence. The texts are those that the family's models write.
"""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest
from tokenizers import AddedToken, Tokenizer

from protocol.decoding.grammar import Grammar
from protocol.gateway import GatewayModel, GatewaySettings
from protocol.messages import ChatMessage, Sampling, Text
from services.gateway.app import Gateway
from services.gateway.errors import ApiError
from services.gateway.reasoning import Thought
from services.gateway.task import Choice, PromptInput, Task, TaskPlanner, Thinking
from services.gateway.template import ModelText
from services.gateway.tools.calls import ParsedCall
from tests.services.gateway.scripted import ScriptedClient, write_template
from tests.services.gateway.test_dialect_fuzz import post
from tests.services.gateway.test_turns import WEATHER, render, write
from tests.support.families.chat_templates import FAMILIES
from tests.support.tiny_models import EOS, tokenizer_json

ARGUMENTS = '{"city": "Oslo"}'
HERMES = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
DOCUMENT = '{"colour": "red"}'
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"type": "string"}},
    "required": ["colour"],
}
CHANNELS = [
    "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>",
]  # fmt: skip


class Family(NamedTuple):
    """How models of a family write."""

    call: str = HERMES
    thought: str = ""
    """Empty: they do not think."""
    before: str = ""
    """What precedes an answer."""
    opened: bool = False
    """Whether prompts end within a thought."""
    tokens: tuple[str, ...] = ()


BARE = f'{{"name": "weather", "parameters": {ARGUMENTS}}}'
CALLS = ("<tool_call>", "</tool_call>")
THOUGHT = Family(thought="<think>\nhm {\n</think>\n\n", tokens=("<think>", "</think>", *CALLS))
WRITING: dict[str, Family] = {
    "qwen2.5": Family(tokens=CALLS),
    "qwen3": THOUGHT,
    "qwq": THOUGHT._replace(thought="hm {\n</think>\n\n", opened=True),
    "deepseek-r1": THOUGHT._replace(thought="hm {\n</think>\n\n", opened=True),
    "llama3": Family(call=BARE),
    "mistral": Family(
        call=f'[TOOL_CALLS][{{"name": "weather", "arguments": {ARGUMENTS}}}]',
        tokens=("[TOOL_CALLS]",),
    ),
    "devstral": Family(call=f"[TOOL_CALLS]weather[ARGS]{ARGUMENTS}", tokens=("[TOOL_CALLS]",)),
    "gpt-oss": Family(
        call=f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{ARGUMENTS}",
        thought="<|channel|>analysis<|message|>hm {<|end|><|start|>assistant",
        before="<|channel|>final<|message|>",
        tokens=tuple(CHANNELS),
    ),
}
REQUESTS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "tools": {"functions": [WEATHER]},
    "a schema": {"schema": SCHEMA},
    "tools and a schema": {"functions": [WEATHER], "schema": SCHEMA},
    "one call or a schema": {"functions": [WEATHER], "schema": SCHEMA, "one_call": True},
    "a forced call": {"functions": [WEATHER], "must_call": True},
    "a forced call and a schema": {"functions": [WEATHER], "must_call": True, "schema": SCHEMA},
}
THINKINGS: dict[str, Thinking] = {
    "": Thinking(),
    "off": Thinking(enabled=False),
    "on": Thinking(enabled=True),
    "effort": Thinking(effort="high"),
    "budget": Thinking(budget=100),
}


def may_think(family: Family, request: dict[str, Any], thinking: Thinking) -> bool:
    """Freely unless the answer must be one thing, a call or JSON; then if it is asked for."""
    if not family.thought or thinking.enabled is False:
        return False
    free = not request.get("must_call") and ("schema" not in request or "functions" in request)
    return free or thinking != Thinking()


class Desk:
    """Plans tasks for one family, and tries what its grammars take."""

    def __init__(self, folder: Path, name: str) -> None:
        self.family = WRITING.get(name, Family())
        self.template = FAMILIES[name]
        self.folder = write_template(folder, self.template)
        self._tokenizer: Any = Tokenizer.from_str(tokenizer_json())
        for token in self.family.tokens:
            special = token.startswith(("<|", "["))
            self._tokenizer.add_tokens([AddedToken(token, special=special, normalized=False)])
        self._tokenizer.save(str(self.folder / "tokenizer.json"))
        self.planner = TaskPlanner(ModelText(self.folder))

    def plan(self, messages: list[ChatMessage] | None = None, **fields: Any) -> Choice:
        start, thought = fields.pop("answer_start", ""), fields.pop("answer_thought", "")
        asked = messages or [ChatMessage("user", "hello")]
        prompt = PromptInput(messages=asked, answer_start=start, answer_thought=thought)
        [choice] = self.planner.plan(Task(prompts=[prompt], sampling=Sampling(), **fields))
        return choice

    def takes(self, grammar: str, text: str) -> bool:
        """Whether a grammar takes all of this text, and lets the answer end there."""
        tokens = self._tokenizer.encode(text, add_special_tokens=False).ids
        return Grammar.start(grammar, self.folder, [EOS]).count_allowed([*tokens, EOS]) > len(
            tokens
        )


def grammar_of(choice: Choice) -> str:
    options = choice.request.sampling.logits_options
    return options.grammar if options else ""


def read(choice: Choice, *texts: str, cut_off: bool = False) -> list[tuple[str, str]]:
    """The parts of an answer that comes in small pieces, each with its kind."""
    transcript = choice.transcript
    for text in texts:
        for at in range(0, len(text), 3):
            piece = text[at : at + 3]
            transcript.push(Text(request=1, tokens=[5], origins=["target"], pieces=[piece]))
    transcript.end(cut_off=cut_off)
    return [
        describe(part) for part in transcript.parts if not isinstance(part, str) or part.strip()
    ]


def describe(part: Any) -> tuple[str, str]:
    if isinstance(part, ParsedCall):
        return ("call", f"{part.name}{part.arguments}")
    return ("thought", part.text) if isinstance(part, Thought) else ("text", part.strip())


def list_cells() -> Iterator[tuple[str, dict[str, Any], str, Thinking]]:
    for (name, request), (how, thinking) in itertools.product(REQUESTS.items(), THINKINGS.items()):
        yield name, request, how, thinking


CALLED = ("call", f"weather{ARGUMENTS}")


@pytest.mark.parametrize("name", FAMILIES)
def test_every_cell(tmp_path: Path, name: str) -> None:
    """Calls, documents, with thoughts and without: allowed and read, or not taken."""
    desk = Desk(tmp_path, name)
    family = desk.family
    for what, request, how, thinking in list_cells():
        cell = f"{what}, thinking {how or 'as it is'}"
        thinks = may_think(family, request, thinking)
        forced = bool(request.get("must_call"))
        own = family.call if not forced or name == "gpt-oss" else HERMES
        said = {"call": own, "text": family.before + DOCUMENT}
        for kind, with_thought in itertools.product(said, (False, True)):
            choice = desk.plan(**request, thinking=thinking)
            assert "hello" in render(desk.template, choice.request), cell
            grammar = grammar_of(choice)
            assert bool(grammar) == ("schema" in request or forced), cell
            text = (family.thought if with_thought else "") + said[kind]
            begins = family.opened and not choice.request.answer_start
            allowed = not forced if kind == "text" else "functions" in request
            if with_thought and not family.thought:
                continue
            if grammar:
                allowed = (
                    allowed and with_thought <= thinks and (with_thought or not (begins and thinks))
                )
                assert desk.takes(grammar, text) == allowed, f"{cell}: {text}"
            if not allowed or (with_thought and not thinks) or (begins and not with_thought):
                continue
            parts = read(choice, text)
            end = CALLED if kind == "call" else ("text", DOCUMENT)
            assert parts == [*([("thought", "hm {")] if with_thought else []), end], (
                f"{cell}: {text}"
            )


@pytest.mark.parametrize("name", FAMILIES)
def test_an_answer_that_was_begun_goes_on(tmp_path: Path, name: str) -> None:
    """After the thought, if the prompt opens one; under a grammar it is refused."""
    desk = Desk(tmp_path, name)
    for request, thinking in itertools.product(REQUESTS.values(), THINKINGS.values()):
        asked = {**request, "thinking": thinking, "answer_start": "One"}
        if "schema" in request or request.get("must_call"):
            with pytest.raises(ApiError, match="cannot be begun by the client"):
                desk.plan(**asked)
            continue
        choice = desk.plan(**asked)
        close = "</think>\n\n" if desk.family.opened else ""
        assert choice.request.answer_start == f"{close}{desk.family.before}One"
        assert read(choice, ", two and three.") == [("text", ", two and three.")]
    if desk.family.thought.endswith("</think>\n\n"):
        choice = desk.plan(answer_start="<think>\nI")
        assert choice.request.answer_start == ("\nI" if desk.family.opened else "<think>\nI")
        assert read(choice, " see</think>\n\nOne") == [("thought", "see"), ("text", "One")]


@pytest.mark.parametrize("name", WRITING)
def test_a_thought_that_was_begun_goes_on(tmp_path: Path, name: str) -> None:
    """The client's thought is written as the family writes its own, once, also if it is all."""
    desk = Desk(tmp_path, name)
    whole = desk.plan(answer_start="One", answer_thought="hm {")
    assert whole.request.answer_start.count("hm {") == bool(desk.family.thought)
    assert read(whole, ", two.") == [("text", ", two.")]
    if not desk.family.thought.endswith("</think>\n\n"):
        return
    opening = "" if desk.family.opened else "<think>"
    assert whole.request.answer_start == f"{opening}\nhm {{\n</think>\n\nOne"
    alone = desk.plan(answer_thought="hm {")
    assert alone.request.answer_start == f"{opening}\nhm {{"
    assert read(alone, " so</think>\n\nOne") == [("thought", "so"), ("text", "One")]
    off = desk.plan(answer_start="One", answer_thought="hm {", thinking=Thinking(enabled=False))
    assert "hm {" not in off.request.answer_start
    with pytest.raises(ApiError, match="cannot be begun by the client"):
        desk.plan(answer_thought="hm {", schema=SCHEMA)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_budget_ends_thoughts(tmp_path: Path, name: str) -> None:
    """With the family's mark; a grammar goes on from there without a thought."""
    desk = Desk(tmp_path, name)
    for request in REQUESTS.values():
        choice = desk.plan(**request, thinking=Thinking(budget=3))
        limit = choice.thought_limit
        assert (limit is not None) == bool(desk.family.thought)
        if limit is None:
            continue
        pieces = [desk.family.thought[: desk.family.thought.index("hm")], *["hm "] * 4]
        events = [
            Text(request=1, tokens=[5], origins=["target"], pieces=[piece]) for piece in pieces
        ]
        assert [limit.is_reached(event) for event in events][-2:] == [True, True]
        forced = bool(request.get("must_call"))
        own = desk.family.call if name == "gpt-oss" else HERMES
        after = own if forced else DOCUMENT
        if limit.after and not forced:
            after = desk.family.before + DOCUMENT
        if limit.after:
            assert desk.takes(limit.after, after)
        parts = read(choice, *pieces, limit.end, after)
        thought, answer = parts
        assert (thought[0], thought[1].strip()) == ("thought", ("hm " * 4).strip())
        assert answer == (CALLED if forced else ("text", DOCUMENT))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_stop_string_within_a_call(tmp_path: Path, name: str) -> None:
    """It leaves a call that is not complete, or its text: never a call that was not made."""
    desk = Desk(tmp_path, name)
    for request in (REQUESTS["tools"], REQUESTS["tools and a schema"], REQUESTS["a forced call"]):
        for thinking in (Thinking(enabled=False), Thinking()):
            choice = desk.plan(**request, thinking=thinking, stop=["Os"])
            assert choice.request.stop == ["Os"]
            own = desk.family.call if not request.get("must_call") or name == "gpt-oss" else HERMES
            thinks = may_think(desk.family, request, thinking) and desk.family.opened
            read(
                choice, desk.family.thought if thinks else "", own[: own.index("Os")], cut_off=True
            )
            said = choice.transcript.content + "".join(c.arguments for c in choice.transcript.calls)
            assert '{"city": "' in said
            assert not choice.transcript.has_whole_calls


@pytest.mark.parametrize("name", FAMILIES)
def test_results_go_with_every_request(tmp_path: Path, name: str) -> None:
    """A conversation with calls and results is shown, whatever the answer must be."""
    desk = Desk(tmp_path, name)
    messages, words = write("suctumtu")
    for request, thinking in itertools.product(REQUESTS.values(), THINKINGS.values()):
        choice = desk.plan(messages, **request, thinking=thinking)
        text = render(desk.template, choice.request)
        assert all(text.count(word) == 1 for word in words)


BOTH = [f"{HERMES}\n{HERMES}", DOCUMENT]
"""What a model may say to tools and a schema."""


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_calls_or_a_schema_through_every_door(tmp_path: Path, *, stream: bool) -> None:
    """Tools that may be called, and the schema of an answer, as frameworks send on every turn."""
    stub = ScriptedClient(*BOTH * 3, size=1000)
    function = {"name": "weather", "parameters": WEATHER.parameters}
    wanted = {"type": "json_schema", "name": "x", "schema": SCHEMA}
    turn: Any = [{"role": "user", "content": "hello"}]
    chat: dict[str, Any] = {
        "messages": turn, "tools": [{"type": "function", "function": function}],
        "response_format": {"type": "json_schema", "json_schema": wanted},
    }  # fmt: skip
    responses: dict[str, Any] = {
        "input": "hello", "tools": [{"type": "function", **function}], "text": {"format": wanted},
    }  # fmt: skip
    messages: dict[str, Any] = {
        "messages": turn, "max_tokens": 50, "output_config": {"format": wanted},
        "tools": [{"name": "weather", "input_schema": WEATHER.parameters}],
    }  # fmt: skip
    models = [
        GatewayModel(
            names=["large"],
            clients_address="",
            folder=str(write_template(tmp_path, FAMILIES["qwen2.5"])),
        )
    ]
    settings = GatewaySettings(lifeline=0, listener=0, models=models)
    application = Gateway(settings, lambda _: cast("Any", stub)).app("")
    for path, body in (
        ("/v1/chat/completions", chat),
        ("/v1/responses", responses),
        ("/v1/messages", messages),
    ):
        called = post(application, path, {**body, "stream": stream}).text
        assert called.count("Oslo") >= 2, path
        assert "<tool_call>" not in called
        said = post(application, path, {**body, "stream": stream}).text
        assert "colour" in said, path
        assert "tool_use" not in said
    grammars = {request.sampling.logits_options.grammar for request in stub.requests}  # type: ignore[union-attr]
    assert len(grammars) == 1
    assert grammars.pop().startswith("start: calls | document")
