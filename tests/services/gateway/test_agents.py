"""What coding agents do, against a real stack: tools, prefixes, titles in the background.

One tiny model of random weights serves all tests; its template knows no tools, like that of
the default pair.
"""

import contextlib
import json
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from launch.settings.settings import StackSettings
from tests.support.stack import DEADLINE_S, RunningStack, eventually, held, running, unwatched_stops
from tests.support.tiny_models import write_tiny_model

pytestmark = pytest.mark.processes

HELLO: list[Any] = [{"role": "user", "content": "hello there"}]
CITIES = ["Oslo", "Rome"]
OPEN = {"type": "object", "properties": {"city": {"type": "string", "enum": CITIES}}}
"""A schema as clients write it: nothing is required, and nothing forbids more properties."""
WEATHER: Any = {"type": "function", "function": {"name": "weather", "parameters": OPEN}}
FREE = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
NOTE: Any = {"type": "function", "function": {"name": "note", "parameters": FREE}}


@pytest.fixture(scope="module")
def stack() -> Iterator[RunningStack]:
    """One place for answers, so that it is plain who goes first."""
    with (
        tempfile.TemporaryDirectory(prefix="ssd-t-") as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("SSD_RUN_DIR", folder)
        long = {"max_position_embeddings": 200_000}
        target = write_tiny_model(Path(folder) / "target", "llama", seed=1, config=long)
        settings = StackSettings(
            model=str(target),
            draft_model=str(target),
            http=True,
            port=0,
            decode_concurrency=1,
            prompt_cache_size=50,
            hang_timeout_s=DEADLINE_S,
        )
        with unwatched_stops(), running(settings) as found:
            yield found


@pytest.fixture(scope="module")
def client(stack: RunningStack) -> Iterator[openai.OpenAI]:
    assert stack.supervisor.listener is not None
    url = f"{stack.supervisor.listener.url}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=DEADLINE_S) as found:
        yield found


@pytest.fixture(scope="module")
def other(stack: RunningStack) -> Iterator[anthropic.Anthropic]:
    assert stack.supervisor.listener is not None
    url = stack.supervisor.listener.url
    with anthropic.Anthropic(
        base_url=url, api_key="none", max_retries=0, timeout=DEADLINE_S
    ) as found:
        yield found


def chat(client: openai.OpenAI, **fields: Any) -> Any:
    fields = {"model": "target", "messages": HELLO, "max_tokens": 200, **fields}
    return client.chat.completions.create(**fields)


# ---------------------------------------------------------------- tools and schemas


def test_a_forced_call_ends_in_every_api(client: openai.OpenAI, other: anthropic.Anthropic) -> None:
    """A model of random weights would invent properties without end if the schema let it."""
    said = chat(client, tools=[WEATHER], tool_choice="required")
    *_, last = chunks = list(chat(client, tools=[WEATHER], tool_choice="required", stream=True))
    response = client.responses.create(
        model="target", input="hello", max_output_tokens=200, tool_choice="required",
        tools=[{"type": "function", "name": "weather", "parameters": OPEN, "strict": None}],
    )  # fmt: skip
    message = other.messages.create(
        model="target", messages=HELLO, max_tokens=200, tool_choice={"type": "any"},
        tools=[{"name": "weather", "input_schema": OPEN}],
    )  # fmt: skip
    [call], [item], [block] = said.choices[0].message.tool_calls, response.output, message.content
    [streamed] = [c for chunk in chunks for c in chunk.choices[0].delta.tool_calls or []]
    assert item.type == "function_call"
    assert block.type == "tool_use"
    ends = (said.choices[0].finish_reason, last.choices[0].finish_reason, message.stop_reason)
    assert ends == ("tool_calls", "tool_calls", "tool_use")
    assert response.status == "completed"
    arguments = json.loads(call.function.arguments)
    assert arguments in [{}, *({"city": city} for city in CITIES)]
    others = (streamed.function.arguments, item.arguments, json.dumps(block.input))
    assert [json.loads(one) for one in others] == [arguments] * 3


def test_nothing_is_invented(client: openai.OpenAI) -> None:
    """Eight samples of a call and of an answer: each ends, with what the schema names."""
    sampled: dict[str, Any] = {"temperature": 1, "seed": 1, "n": 8}
    wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": OPEN}}
    calls = chat(client, tools=[WEATHER], tool_choice="required", **sampled)
    answers = chat(client, response_format=wanted, **sampled)
    texts = [choice.message.tool_calls[0].function.arguments for choice in calls.choices]
    texts += [choice.message.content for choice in answers.choices]
    known = [{}, *({"city": city} for city in CITIES)]
    assert all(json.loads(text) in known for text in texts)


def test_a_schema_ends(client: openai.OpenAI) -> None:
    """The same for answers that must be JSON; drafts are taken under a grammar, too."""
    schema = {"type": "object", "properties": {"where": OPEN}, "required": ["where"]}
    wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    drafted: list[Any] = []

    def comes_in_time() -> bool:
        drafts = {"num_draft_tokens": 3}
        drafted.append(chat(client, response_format=wanted, extra_body=drafts))
        return bool(drafted[-1].timings["draft_n_accepted"] > 0)

    eventually(comes_in_time, "drafts come in time")
    plain = chat(client, response_format=wanted, extra_body={"draft_model": None})
    assert plain.choices[0].finish_reason == "stop"
    assert json.loads(plain.choices[0].message.content).keys() == {"where"}
    assert drafted[-1].choices[0].message.content == plain.choices[0].message.content


def test_an_unfinished_call_is_a_call_and_is_taken_back(
    client: openai.OpenAI, other: anthropic.Anthropic
) -> None:
    """A text of random weights does not end; what there is of it goes into the next request."""
    said = chat(client, tools=[NOTE], tool_choice="required", max_tokens=40)
    message = said.choices[0].message
    [call] = message.tool_calls
    assert (call.function.name, said.choices[0].finish_reason) == ("note", "length")
    result = {"role": "tool", "tool_call_id": call.id, "content": "cut off"}
    turns = [*HELLO, message.model_dump(), result]
    assert chat(client, messages=turns, tools=[NOTE], max_tokens=4).id
    first = other.messages.create(
        model="target", messages=HELLO, max_tokens=40, tool_choice={"type": "any"},
        tools=[{"name": "note", "input_schema": FREE}],
    )  # fmt: skip
    [block] = first.content
    assert block.type == "tool_use"
    answer: list[Any] = [{"type": "tool_result", "tool_use_id": block.id, "content": "cut off"}]
    second = other.messages.create(
        model="target", max_tokens=4, tools=[{"name": "note", "input_schema": FREE}],
        messages=[
            *HELLO, {"role": "assistant", "content": first.content},
            {"role": "user", "content": answer},
        ],
    )  # fmt: skip
    assert second.usage.output_tokens == 4


def test_tools_may_be_there_and_not_be_called(client: openai.OpenAI) -> None:
    """With a template that knows none, and the fields that agents send along."""
    answer = chat(
        client, tools=[WEATHER, NOTE], parallel_tool_calls=False, max_tokens=8,
        reasoning_effort="low", store=False, metadata={"a": "b"}, service_tier="auto",
    )  # fmt: skip
    assert answer.usage.completion_tokens == 8
    without = chat(client, max_tokens=8)
    assert answer.usage.prompt_tokens > without.usage.prompt_tokens + 50


# ---------------------------------------------------------------- completions


def test_several_texts_are_continued(client: openai.OpenAI) -> None:
    """As if each had been alone; -1 is no limit, and of two limits the newer holds."""
    asked: dict[str, Any] = {"model": "target", "max_tokens": 8}
    texts = ["once upon", "a time"]
    both = client.completions.create(**asked, prompt=texts, echo=True)
    alone = [client.completions.create(**asked, prompt=text).choices[0].text for text in texts]
    assert [choice.text for choice in both.choices] == [
        text + said for text, said in zip(texts, alone, strict=True)
    ]
    end = alone[0][-3:]
    without = client.completions.create(model="target", prompt=texts[0], max_tokens=-1, stop=end)
    assert without.choices[0].text == alone[0][: alone[0].index(end)]
    limited = chat(client, max_tokens=100, max_completion_tokens=5)
    assert limited.usage.completion_tokens == 5


def test_the_rejection_rule_over_http(client: openai.OpenAI) -> None:
    """With Saguaro, drafts are accepted by it; the coupled rule is what others have."""
    rule = {"acceptance": "rejection", "saguaro_c": 0.5, "draft_temperature": 0.9}
    last: list[Any] = []

    def accepted() -> bool:
        body = {**rule, "num_draft_tokens": 3}
        last.append(chat(client, temperature=1, seed=5, max_tokens=64, extra_body=body))
        return bool(last[-1].timings["draft_n_accepted"] > 0)

    eventually(accepted, "drafts come in time")
    assert last[-1].usage.completion_tokens == 64


# ---------------------------------------------------------------- prefixes

Ask = Callable[[str, list[Any]], tuple[str, int, int]]
"""From instructions and turns to the answer's text, the prompt's tokens and the cached ones."""


@pytest.fixture(params=["chat", "responses", "messages"])
def ask(request: pytest.FixtureRequest, client: openai.OpenAI, other: anthropic.Anthropic) -> Ask:
    """One door, in the same words for all."""

    def by_chat(system: str, turns: list[Any]) -> tuple[str, int, int]:
        answer = chat(client, messages=[{"role": "system", "content": system}, *turns],
                      max_tokens=8)  # fmt: skip
        usage = answer.usage
        text = answer.choices[0].message.content
        return text, usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens

    def by_responses(system: str, turns: list[Any]) -> tuple[str, int, int]:
        answer = client.responses.create(
            model="target", instructions=system, input=turns, max_output_tokens=8
        )
        usage = answer.usage
        assert usage is not None
        return answer.output_text, usage.input_tokens, usage.input_tokens_details.cached_tokens

    def by_messages(system: str, turns: list[Any]) -> tuple[str, int, int]:
        answer = other.messages.create(model="target", system=system, messages=turns, max_tokens=8)
        [block] = answer.content
        cached = answer.usage.cache_read_input_tokens or 0
        return block.to_dict()["text"], answer.usage.input_tokens + cached, cached  # type: ignore[return-value]

    doors: dict[str, Ask] = {"chat": by_chat, "responses": by_responses, "messages": by_messages}
    return doors[request.param]


def test_beginnings_are_computed_once(ask: Ask, request: pytest.FixtureRequest) -> None:
    """Turns that are appended, a branch from an earlier turn, a title, another tail."""
    system = f"{request.node.name}: you are careful. " + "Tool: it reads a file. " * 20
    first: list[Any] = [{"role": "user", "content": "Look."}]
    text, prompt, cached = ask(system, first)
    assert cached < prompt / 4  # what all prompts begin with
    history, before = [*first, {"role": "assistant", "content": text}], prompt
    fork, forked = history, prompt
    for turn in range(3):
        asked = {"role": "user", "content": f"Step {turn}."}
        text, prompt, cached = ask(system, [*history, asked])
        assert prompt > cached >= before - 1
        history, before = [*history, asked, {"role": "assistant", "content": text}], prompt
    title = {"role": "user", "content": "A title, please."}
    assert ask(system, [*history, title])[2] >= before - 1
    for branch in range(2):
        asked = {"role": "user", "content": f"Variant {branch}."}
        _, prompt, cached = ask(system, [*fork, asked])
        assert prompt > cached >= forked - 1
    tail = [{"role": "user", "content": "Something else."}]
    _, prompt, cached = ask(system, tail)
    assert prompt > cached > 0.8 * forked


def test_the_doors_share_what_they_computed(
    client: openai.OpenAI, other: anthropic.Anthropic
) -> None:
    """The same conversation through another API is the same prompt."""
    turns: list[Any] = [{"role": "user", "content": "shared by all of them " * 10}]
    said = chat(client, messages=turns, max_tokens=4)
    message = other.messages.create(model="target", messages=turns, max_tokens=4)
    response = client.responses.create(model="target", input=turns, max_output_tokens=4)
    assert message.usage.cache_read_input_tokens == said.usage.prompt_tokens - 1
    assert response.usage is not None
    assert response.usage.input_tokens_details.cached_tokens == said.usage.prompt_tokens - 1


# ---------------------------------------------------------------- who goes first


def test_background_requests_yield(client: openai.OpenAI, stack: RunningStack) -> None:
    """One that waits lets a later one by; it would not end, so the later one had to be first."""
    begun = threading.Event()
    leave = threading.Event()

    def dream() -> None:
        header = {"X-Priority": "background"}
        with chat(client, max_tokens=100_000, stream=True, extra_headers=header) as chunks:
            for chunk in chunks:
                if chunk.choices[0].delta.content:
                    begun.set()
                    break
            leave.wait(DEADLINE_S)

    dreaming = threading.Thread(target=dream)
    answers: list[Any] = []
    asking = threading.Thread(target=lambda: answers.append(chat(client, max_tokens=4)))
    with chat(client, max_tokens=100_000, stream=True) as chunks:
        next(iter(chunks))
        # Otherwise the others would have had their turns before the test looks.
        with held(stack, "verifier"):
            dreaming.start()
            eventually(lambda: stack.client.status().waiting == 1, "the background waits")
            asking.start()
            eventually(lambda: stack.client.status().waiting == 2, "the other one waits, too")
    asking.join(DEADLINE_S)
    assert answers
    assert begun.wait(DEADLINE_S)
    leave.set()
    dreaming.join(DEADLINE_S)
    eventually(lambda: stack.client.status().active == 0, "the place is free again")


@pytest.mark.parametrize("door", ["chat", "completions", "responses", "messages"])
def test_leaving_frees_the_only_place(
    client: openai.OpenAI, other: anthropic.Anthropic, door: str
) -> None:
    """In the middle of a stream, through every door: the next request is answered."""
    many = 100_000
    with contextlib.ExitStack() as held:
        if door == "chat":
            stream: Any = held.enter_context(chat(client, max_tokens=many, stream=True))
        elif door == "completions":
            stream = held.enter_context(
                client.completions.create(model="target", prompt="x", max_tokens=many, stream=True)
            )
        elif door == "responses":
            stream = held.enter_context(
                client.responses.create(model="target", input="x", stream=True)
            )
        else:
            stream = held.enter_context(
                other.messages.create(model="target", messages=HELLO, max_tokens=many, stream=True)
            )
        for _ in range(4):
            next(iter(stream))
    assert chat(client, max_tokens=2).usage.completion_tokens == 2
