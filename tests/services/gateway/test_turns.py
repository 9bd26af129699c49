"""Conversations as clients send them, fitted to the templates of model families.

Rendered with the family's template, each shows every word, and none twice.
"""

import itertools
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from msgspec import to_builtins

from protocol.decoding.chat_template import compile_template
from protocol.messages import ChatMessage, Sampling
from services.gateway.dialects.openai import describe_call
from services.gateway.task import PromptInput, Task, TaskPlanner
from services.gateway.template import ModelText
from services.gateway.tools.calls import ToolFunction
from tests.services.gateway.scripted import write_template
from tests.support.families.chat_templates import FAMILIES

WEATHER = ToolFunction(
    name="weather", parameters={"type": "object", "properties": {"city": {"type": "string"}}}
)
SHAPES: dict[str, str] = {
    "one": "u",
    "instructions": "su",
    "two turns of one role": "uu",
    "two answers": "uaau",
    "joined everywhere": "suuaauua",
    "an answer first": "au",
    "instructions late": "usau",
    "instructions last": "uaus",
    "instructions alone": "s",
    "instructions in the middle and an answer first": "saus",
    "a result": "uct",
    "a result and a text": "uctu",
    "two results and a text": "uctctuau",
    "two calls at once": "udtt",
    "two calls at once, twice": "udttaudttu",
    "a text with a call": "umt",
    "a text with a call, answered": "umtau",
    "texts with calls in a row": "umtmtau",
    "a call that was interrupted": "ucu",
    "a call and a text of the assistant's": "ucau",
    "a result without its call": "utu",
    "a result first": "tau",
    "one result of two": "udtu",
    "instructions after a result": "uctsu",
    "an empty answer": "ueu",
    "an empty answer between calls": "ucteuctu",
}
"""Turns of system, user, assistant, call, double call, call with text (m), tool; e says nothing."""


def write(shape: str) -> tuple[list[ChatMessage], list[str]]:
    """The conversation of a shape, and its words in order."""
    numbers = itertools.count(1)
    words: list[str] = []
    calls: list[str] = []
    messages: list[ChatMessage] = []

    def word() -> str:
        words.append(f"word{next(numbers)}end")
        return words[-1]

    for letter in shape:
        if letter == "t":
            call_id = calls.pop(0) if calls else "call_of_another_time"
            messages.append(ChatMessage("tool", word(), tool_call_id=call_id))
            continue
        role = {"s": "system", "u": "user"}.get(letter, "assistant")
        content = "" if letter in "cde" else word()
        made: list[dict[str, Any]] = []
        for _ in range({"c": 1, "d": 2, "m": 1}.get(letter, 0)):
            calls.append(f"call_{next(numbers):024}")
            made.append(describe_call(calls[-1], "weather", {"city": word()}))
        messages.append(ChatMessage(role, content, tool_calls=made))
    return messages, words


compiled = cache(compile_template)


def render(template: str, request: Any) -> str:
    """As the orchestrator does."""
    return compiled(template).render(
        messages=[{"content": "", **to_builtins(message)} for message in request.messages],
        tools=request.tools or None,
        add_generation_prompt=True,
        **request.template_options,
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_no_conversation_is_refused_and_no_word_is_lost(tmp_path: Path, family: str) -> None:
    """Of every shape, with tools and without."""
    template = FAMILIES[family]
    planner = TaskPlanner(ModelText(write_template(tmp_path, template)))
    faults: list[str] = []
    for (name, shape), functions in itertools.product(SHAPES.items(), ([WEATHER], [])):
        messages, words = write(shape)
        task = Task(
            prompts=[PromptInput(messages=messages)], sampling=Sampling(), functions=functions
        )
        [choice] = planner.plan(task)
        try:
            text = render(template, choice.request)
        # A template is a program: it may raise anything.
        except Exception as error:  # noqa: BLE001
            faults.append(f"{name} ({shape}, {len(functions)} tools): {error}")
            continue
        if sorted(re.findall(r"word\d+end", text)) != sorted(words):
            faults.append(f"{name} ({shape}, {len(functions)} tools): {words}\n{text}")
        if functions and "weather" not in text:
            faults.append(f"{name} ({shape}): no tools")
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("family", FAMILIES)
def test_conversations_in_order_are_left_as_they_are(tmp_path: Path, family: str) -> None:
    """What every template takes is not changed."""
    planner = TaskPlanner(ModelText(write_template(tmp_path, FAMILIES[family])))
    for shape in ("u", "uau", "uauau"):
        messages, _ = write(shape)
        prompt = PromptInput(messages=messages)
        [choice] = planner.plan(Task(prompts=[prompt], sampling=Sampling()))
        assert choice.request.messages == messages
