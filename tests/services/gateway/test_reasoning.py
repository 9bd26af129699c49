"""Thoughts are taken out of the text of each family, however it is cut into pieces."""

from pathlib import Path
from typing import Any

import pytest

from protocol.messages import ChatMessage, Sampling
from services.gateway.reasoning import Thought, ThoughtFormat, ThoughtReader, find_thought_format
from services.gateway.task import PromptInput, Task, TaskPlanner, Thinking
from services.gateway.template import ModelText
from services.gateway.tools.calls import ParsedCall
from services.gateway.tools.harmony import HarmonyReader
from services.gateway.transcript import find_answer_format
from tests.services.gateway.scripted import write_template

THINK = ThoughtFormat("<think>", "</think>")
GEMMA = ThoughtFormat("<|channel>thought", "<channel|>", anywhere=True)
CASES: dict[str, tuple[ThoughtFormat, bool, str, str, str]] = {
    "none": (THINK, False, "Just an answer.", "", "Just an answer."),
    "thought": (THINK, False, "<think>\nhm\n</think>\n\nYes.", "hm", "Yes."),
    "blank first": (THINK, False, "\n\n<think>hm</think>Yes.", "hm", "Yes."),
    "empty": (THINK, False, "<think>\n\n</think>\n\nYes.", "", "Yes."),
    "cut off": (THINK, False, "<think>\nhm, I", "hm, I", ""),
    "cut in the mark": (THINK, False, "<think>hm</thi", "hm</thi", ""),
    "opened by the prompt": (THINK, True, "\nhm\n</think>\n\nYes.", "hm", "Yes."),
    "opened and cut off": (THINK, True, "hm", "hm", ""),
    "mark in the answer": (THINK, False, "Write <think> here.", "", "Write <think> here."),
    "blanks inside": (THINK, False, "<think>a\n\n b</think>c\n\nd", "a\n\n b", "c\n\nd"),
    "half a mark": (THINK, False, "<thin", "", "<thin"),
    "only blanks": (THINK, False, "  \n", "", "  \n"),
    "twice": (GEMMA, False, "<|channel>thought\nhm<channel|>Yes<|channel>thought\nor<channel|>no",
              "hmor", "Yesno"),
    "later": (GEMMA, False, "Well <|channel>thought\nhm<channel|> so", "hm", "Well so"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("size", [1, 2, 5, 1000])
def test_thoughts_are_apart(case: tuple[ThoughtFormat, bool, str, str, str], size: int) -> None:
    """Thought and answer are the same for every way of cutting; a cut-off thought stays one."""
    form, opened, text, thought, answer = case
    reader = ThoughtReader(form, opened=opened)
    parts: list[Any] = []
    for at in range(0, len(text), size):
        parts += reader.push(text[at : at + size])
    parts += reader.end()
    assert "".join(part.text for part in parts if isinstance(part, Thought)) == thought
    assert "".join(part for part in parts if isinstance(part, str)) == answer


FINAL = "<|channel|>final<|message|>It is 4."
HARMONY: dict[str, tuple[str, list[Any]]] = {
    "final": (FINAL, ["It is 4."]),
    "thought": (
        f"<|channel|>analysis<|message|>2+2 < 5<|end|><|start|>assistant{FINAL}<|return|>",
        [Thought("2+2 < 5"), "It is 4."],
    ),
    "call": (
        "<|channel|>analysis<|message|>look<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.find <|constrain|>json<|message|>{"what": "x"}<|call|>',
        [Thought("look"), ("find", '{"what": "x"}', True)],
    ),
    "preamble": (
        "<|channel|>commentary<|message|>I will look.<|end|><|start|>assistant to=functions.find"
        '<|channel|>commentary json<|message|>{"what": "x"}',
        ["I will look.", ("find", '{"what": "x"}', True)],
    ),
    "cut off call": (
        '<|channel|>commentary to=functions.find<|message|>{"what": ',
        [("find", '{"what":', False)],
    ),
    "cut off thought": ("<|channel|>analysis<|message|>I won", [Thought("I won")]),
    "no channels": ("Plain words.", ["Plain words."]),
}


@pytest.mark.parametrize("case", HARMONY.values(), ids=HARMONY)
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_channels_are_read(case: tuple[str, list[Any]], size: int) -> None:
    """gpt-oss' analysis is thought, its commentary to functions is calls, the rest is text."""
    text, expected = case
    reader, found = HarmonyReader(), list[Any]()
    for at in range(0, len(text), size):
        found += reader.push(text[at : at + size])
    joined: list[Any] = []
    for part in [*found, *reader.end()]:
        if isinstance(part, ParsedCall):
            joined.append((part.name, part.arguments, part.complete))
        elif isinstance(part, Thought) and joined and isinstance(joined[-1], Thought):
            joined[-1] = Thought(joined[-1].text + part.text)
        elif isinstance(part, str) and joined and isinstance(joined[-1], str):
            joined[-1] += part
        else:
            joined.append(part)
    assert joined == expected


@pytest.mark.parametrize(
    ("template", "tokens", "start"),
    [
        ("{{ '<think>' }}{% if x %}</think>{% endif %}", [], "<think>"),
        ("no marks", ["<think>", "</think>"], "<think>"),
        ("[THINK]a[/THINK]", [], "[THINK]"),
        ("<seed:think></seed:think>", [], "<seed:think>"),
        ("<|channel>thought<channel|>", [], "<|channel>thought"),
        ("<|open|>think<|sep|><|close|>think<|sep|>", [], "<|open|>think<|sep|>"),
        ("no marks", [], None),
    ],
)
def test_families_are_recognised(
    tmp_path: Path, template: str, tokens: list[str], start: str | None
) -> None:
    """By their chat template, or by tokens of their own."""
    form = find_thought_format(ModelText(write_template(tmp_path, template, tokens)))
    assert (form.start if form else None) == start


def plan(folder: Path, template: str, **fields: Any) -> Any:
    """The one choice of a task for a model with this template."""
    planner = TaskPlanner(ModelText(write_template(folder, template)))
    prompt = PromptInput(messages=[ChatMessage("user", "hello")])
    [choice] = planner.plan(Task(prompts=[prompt], sampling=Sampling(), **fields))
    return choice


OPENS = (
    "{{ messages[0].content }}{% if enable_thinking is false %}<think></think>{% else %}"
    "<think>{% endif %}{{ reasoning_effort }}"
)


def test_a_prompt_may_open_the_thought(tmp_path: Path) -> None:
    """The template is rendered to find out, with the options of the request."""
    choice = plan(tmp_path, OPENS)
    assert choice.transcript._reader.is_thinking
    off = plan(tmp_path, OPENS, thinking=Thinking(enabled=False))
    assert not off.transcript._reader.is_thinking


def test_a_grammar_is_not_thought_over(tmp_path: Path) -> None:
    """Thinking is turned off; a template that thinks regardless has its thought closed."""
    hybrid = plan(tmp_path, OPENS, schema={"type": "object"})
    assert hybrid.request.template_options == {"enable_thinking": False}
    assert hybrid.request.answer_start == ""
    always = "{{ messages[0].content }}{% if x %}</think>{% endif %}<think>\n"
    closed = plan(tmp_path, always, schema={"type": "object"})
    assert closed.request.answer_start == "</think>\n\n"
    assert not closed.transcript._reader.is_thinking


@pytest.mark.parametrize(
    ("effort", "options"),
    [
        ("none", {"enable_thinking": False, "reasoning_effort": "low"}),
        ("low", {"reasoning_effort": "low"}),
        ("medium", {"reasoning_effort": "medium"}),
        ("xhigh", {"reasoning_effort": "high"}),
        (None, {}),
    ],
)
def test_efforts_reach_the_template(tmp_path: Path, effort: Any, options: dict[str, Any]) -> None:
    """In the three words that gpt-oss knows, and as no thinking at all."""
    choice = plan(tmp_path, OPENS, thinking=Thinking(effort=effort))
    assert choice.request.template_options == options


def test_special_marks_are_asked_for(tmp_path: Path) -> None:
    """Tokens that are hidden in text are shown where a model marks thoughts by them."""
    folder = write_template(tmp_path, "x", ["<|think:start|>", "<|think:end|>"])
    assert find_answer_format(ModelText(folder)).special_marks
    plain = write_template(tmp_path, "x", ["<think>", "</think>"])
    assert not find_answer_format(ModelText(plain)).special_marks
    assert find_answer_format(ModelText(write_template(tmp_path, FINAL))).harmony


STRICT = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('system first') }}{% endif %}{{ m.content }}{% endfor %}"
)
NO_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no') }}{% endif %}"
    "{{ m.content }}{% endfor %}"
)
LENIENT = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "roles"),
    [
        (LENIENT, ["system", "user", "system", "assistant", "user"]),
        (STRICT, ["system", "user", "assistant", "user"]),
        (NO_SYSTEM, ["user", "assistant", "user"]),
    ],
    ids=["anywhere", "first", "nowhere"],
)
def test_system_messages_go_where_a_template_takes_them(
    tmp_path: Path, template: str, roles: list[str]
) -> None:
    """Agents send them in the middle of a conversation too; nothing of them is lost."""
    given = [("system", "a"), ("user", "b"), ("system", "c"), ("assistant", "d"), ("user", "e")]
    planner = TaskPlanner(ModelText(write_template(tmp_path, template)))
    prompt = PromptInput(messages=[ChatMessage(role, text) for role, text in given])
    [choice] = planner.plan(Task(prompts=[prompt], sampling=Sampling()))
    messages = choice.request.messages
    assert [message.role for message in messages] == roles
    said = "".join(message.content for message in messages)
    assert said.replace("\n", "") == "abcde"
