"""Bias, penalties, grammars, log-probabilities, tools: the same answers with and without drafts."""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from launch.settings.settings import StackSettings
from orchestrator.text.tokenizer import TargetTokenizer
from protocol.decoding.grammar import json_grammar
from protocol.errors import UsageError
from protocol.messages import ChatMessage, Generate, LogitsOptions, Mode, Sampling, Text, Tokens
from tests.support.reference import Reference
from tests.support.stack import RunningStack, eventually, running
from tests.support.tiny_models import write_tiny_model

pytestmark = pytest.mark.processes

PROMPT: Tokens = [0, 40, 41, 42, 43, 44]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "green", "blue"]},
        "ready": {"type": "boolean"},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["colour", "ready", "size"],
    "additionalProperties": False,
}
SHAPES = {
    "bias": LogitsOptions(logit_bias=((46, -100.0), (50, 4.0), (70, 2.0))),
    "repetition": LogitsOptions(repetition_penalty=1.3),
    "presence": LogitsOptions(presence_penalty=1.5),
    "frequency": LogitsOptions(frequency_penalty=0.7),
    "all": LogitsOptions(
        logit_bias=((50, 3.0),), repetition_penalty=1.1, presence_penalty=0.3, frequency_penalty=0.4
    ),
    "grammar": LogitsOptions(grammar=json_grammar(SCHEMA), frequency_penalty=0.2),
}
TOOL = {
    "type": "function",
    "function": {
        "name": "paint",
        "description": "Paints it.",
        "parameters": SCHEMA,
    },
}
TEMPLATE = (
    "{% if tools %}{% for t in tools %}{{ t['function']['name'] }}{% endfor %}{% endif %}"
    "{% for m in messages %}<|user|>{{ m['content'] }}{% if m.tool_calls %}"
    "{% for c in m.tool_calls %}{{ c.function.name }}"
    "{% for name, value in c.function.arguments.items() %}{{ name }}{{ value }}{% endfor %}"
    "{% endfor %}{% endif %}"
    "{% endfor %}{% if mood %}{{ mood }}{% endif %}<|assistant|>"
)
HELLO: list[Any] = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def stack() -> Iterator[RunningStack]:
    """Target and drafter have the same weights, so that a rejection is a drafter's mistake."""
    with (
        tempfile.TemporaryDirectory(prefix="ssd-t-") as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("SSD_RUN_DIR", folder)
        target = write_tiny_model(Path(folder) / "target", "llama", seed=1)
        draft = write_tiny_model(Path(folder) / "draft", "llama", seed=1)
        (target / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
        settings = StackSettings(
            model=str(target), draft_model=str(draft), draft_weights="float", http=True, port=0
        )
        with running(settings) as found:
            found.warm_up()
            yield found


@pytest.fixture(scope="module")
def client(stack: RunningStack) -> Iterator[openai.OpenAI]:
    assert stack.supervisor.listener is not None
    url = f"{stack.supervisor.listener.url}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120) as found:
        yield found


def chat(client: openai.OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(
        **{"model": "default", "messages": HELLO, "max_tokens": 60, **fields}
    )


def answered(
    stack: RunningStack,
    sampling: Sampling,
    mode: Mode,
    *,
    count: int = 40,
    prompt: Tokens = PROMPT,
    num_draft_tokens: int = 4,
) -> Any:
    """Tokens, log-probabilities and statistics of one answer."""
    request = Generate(
        request=stack.client.number(),
        tokens=prompt,
        sampling=sampling,
        max_tokens=count,
        mode=mode,
        num_draft_tokens=0 if mode == "ar" else num_draft_tokens,
    )
    *texts, end = stack.client.generate(request)
    said = [text for text in texts if isinstance(text, Text)]
    tokens = [token for text in said for token in text.tokens]
    return tokens, [entry for text in said for entry in text.logprobs], end


def drafted(stack: RunningStack, sampling: Sampling, mode: Mode, **asked: Any) -> Any:
    """The same, asked again until no draft came too late: which process is faster is left out."""
    found: list[Any] = []

    def in_time() -> bool:
        found.append(answered(stack, sampling, mode, **asked))
        statistics = found[-1][2].statistics
        return statistics.drafted > 0 and "late" not in statistics.fallbacks

    eventually(in_time, "all drafts come in time")
    return found[-1]


@pytest.mark.parametrize("temperature", [0.0, 0.8], ids=["greedy", "sampled"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_drafts_change_no_answer(
    stack: RunningStack, shape: LogitsOptions, temperature: float
) -> None:
    """Every mode says the same tokens, and the feature made a difference."""
    sampling = Sampling(temperature=temperature, seed=4, logits_options=shape)
    plain, _, _ = answered(stack, sampling, "ar")
    for mode in ("sd", "ssd"):
        fast, _, _ = drafted(stack, sampling, mode)
        assert fast == plain
    assert plain != answered(stack, Sampling(temperature=temperature, seed=4), "ar")[0]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_drafter_shapes_as_the_target_does(stack: RunningStack, shape: LogitsOptions) -> None:
    """With the same model on both sides every draft is right, in every round and branch."""
    for mode in ("sd", "ssd"):
        _, _, end = drafted(stack, Sampling(logits_options=shape), mode)
        assert end.statistics.acceptance_rate == 1.0


def test_lookup_drafts_what_the_shape_allows(stack: RunningStack) -> None:
    """Without a draft model: repetitions that a schema or a bias leaves are found and accepted.

    The last place in the prompt that looks like any of them goes on as neither allows.
    """
    folder = stack.client.status().model
    tokenizer = TargetTokenizer(Path(folder))
    wanted = {
        "type": "array",
        "items": {"const": "red sky"},
        "minItems": 9,
        "x-guidance": {"whitespace_pattern": "[ ]"},
    }
    cases = (
        (LogitsOptions(grammar=json_grammar(wanted)), '[ "red sky" , "red sky" , "red mud" , "'),
        (LogitsOptions(logit_bias=((77, 100.0), (78, 100.0))), "ab" * 9),
    )
    with running(StackSettings(model=folder, draft_backend="ngram")) as lookup:
        for shape, prompt in cases:
            asked = tokenizer.encode_text(prompt)
            sampling = Sampling(logits_options=shape)
            plain, _, _ = answered(lookup, sampling, "ar", prompt=asked)
            fast, _, end = answered(lookup, sampling, "ssd", prompt=asked, num_draft_tokens=3)
            assert fast == plain
            s = end.statistics
            assert s.acceptance_rate > 0.5
            assert s.accepted > len(fast) / 3


def test_a_schema_is_followed(stack: RunningStack) -> None:
    """The answer is JSON of the schema and ends by itself, whatever the model wants to say."""
    for seed in range(4):
        sampling = Sampling(temperature=1.0, seed=seed, logits_options=SHAPES["grammar"])
        request = Generate(
            request=stack.client.number(), tokens=PROMPT, sampling=sampling, max_tokens=200
        )
        *texts, end = stack.client.generate(request)
        value = json.loads("".join(text.text for text in texts if isinstance(text, Text)))
        assert value["colour"] in ("red", "green", "blue")
        assert isinstance(value["ready"], bool)
        assert 0 <= value["size"] <= 99
        assert end.reason == "stop"


def test_a_ban_is_kept_and_a_wish_fulfilled(stack: RunningStack) -> None:
    """A bias of -100 bans a token that greedy decoding would say; +100 makes it the only one."""
    plain, _, _ = answered(stack, Sampling(), "ar")
    banned = LogitsOptions(logit_bias=((plain[0], -100.0),))
    assert plain[0] not in answered(stack, Sampling(logits_options=banned), "ssd")[0]
    wanted = LogitsOptions(logit_bias=((77, 100.0),))
    assert set(answered(stack, Sampling(logits_options=wanted), "ssd", count=5)[0]) == {77}


@pytest.mark.parametrize("mode", ["ar", "sd", "ssd"])
def test_log_probabilities_are_the_targets_own(stack: RunningStack, mode: Mode) -> None:
    """They are log-softmax of mlx-lm's logits, one per token, in the order of the tokens."""
    sampling = Sampling(temperature=0.8, seed=2, top_k=20, logprobs=3, logits_options=SHAPES["all"])
    tokens, entries, _ = answered(stack, sampling, mode)
    [rows] = Reference(Path(stack.client.status().model)).rows([PROMPT + tokens])
    exact = _log_softmax(rows[len(PROMPT) - 1 : -1])
    own = [row[token] for row, token in zip(exact, tokens, strict=True)]
    assert [entry.chosen.logprob for entry in entries] == pytest.approx(own, abs=2e-3)
    best = [sorted(row)[::-1][:3] for row in exact]
    found = [[token.logprob for token in entry.best] for entry in entries]
    assert np.allclose(found, best, atol=2e-3)


def _log_softmax(rows: Any) -> Any:
    exact = rows.astype(np.float64)
    exact -= exact.max(-1, keepdims=True)
    return exact - np.log(np.exp(exact).sum(-1, keepdims=True))


# ---------------------------------------------------------------- over HTTP


def test_log_probabilities_over_http(client: openai.OpenAI) -> None:
    """Whole and streamed, chat and text; the bytes of all tokens are the text."""
    asked = {"logprobs": True, "top_logprobs": 2, "max_tokens": 12}
    [choice] = chat(client, **asked).choices
    content = choice.logprobs.content
    assert len(content) == 12
    assert b"".join(bytes(t.bytes) for t in content).decode(errors="replace") == (
        choice.message.content
    )
    assert all(len(t.top_logprobs) == 2 >= t.logprob for t in content)
    streamed = [
        token.logprob
        for chunk in chat(client, stream=True, **asked)
        if chunk.choices and chunk.choices[0].logprobs
        for token in chunk.choices[0].logprobs.content
    ]
    assert streamed == pytest.approx([t.logprob for t in content], abs=1e-4)
    text = client.completions.create(model="default", prompt="hello", max_tokens=5, logprobs=1)
    found: Any = text.choices[0].logprobs
    assert len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs) == 5


def test_a_schema_over_http(client: openai.OpenAI) -> None:
    """response_format is kept, streamed or not; a schema that is none is a clear error."""
    form = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}
    answer = chat(client, response_format=form, temperature=1, seed=1)
    assert json.loads(answer.choices[0].message.content).keys() == {"colour", "ready", "size"}
    chunks = chat(client, response_format=form, temperature=1, seed=1, stream=True)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == answer.choices[0].message.content
    wrongs = (
        ({"type": "colour"}, "schema"),
        ({"$ref": "#/nowhere"}, "schema"),
        ({"enum": ["x" * 2**17]}, "at most 131072"),
    )
    for schema, said in wrongs:
        wrong: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        with pytest.raises(openai.BadRequestError, match=said):
            chat(client, response_format=wrong)


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "paint"}}]
)
def test_a_tool_is_called(client: openai.OpenAI, choice: Any) -> None:
    """A call that is asked for comes as OpenAI's tool_calls, with arguments of its schema."""
    asked = {"tools": [TOOL], "tool_choice": choice, "max_tokens": 200, "seed": 1}
    [found] = chat(client, **asked).choices
    assert (found.finish_reason, found.message.content) == ("tool_calls", None)
    [call] = found.message.tool_calls
    assert call.function.name == "paint"
    assert json.loads(call.function.arguments)["colour"] in ("red", "green", "blue")
    deltas = [c.choices[0].delta for c in chat(client, stream=True, **asked) if c.choices]
    [streamed] = [call for delta in deltas for call in delta.tool_calls or []]
    assert (streamed.index, streamed.function.arguments) == (0, call.function.arguments)
    assert all("<tool" not in (delta.content or "") for delta in deltas)


def test_marks_of_calls_are_seen(client: openai.OpenAI) -> None:
    """Special tokens are text where there are tools, and only there: some models mark calls so."""
    asked: dict[str, Any] = {"logit_bias": {"2": 100, "1": -100}, "max_tokens": 3}
    assert chat(client, **asked).choices[0].message.content == ""
    answer = chat(client, tools=[TOOL], **asked)
    assert answer.choices[0].message.content == "<|user|>" * 3


def test_tools_and_options_reach_the_template(client: openai.OpenAI) -> None:
    """The prompt has the tools, earlier calls as maps, and what the template is told besides."""
    bare = chat(client, max_tokens=1).usage.prompt_tokens
    tools = chat(client, max_tokens=1, tools=[TOOL]).usage.prompt_tokens
    none = chat(client, max_tokens=1, tools=[TOOL], tool_choice="none").usage.prompt_tokens
    option = {"chat_template_kwargs": {"mood": "merry"}}
    mood = chat(client, max_tokens=1, extra_body=option).usage.prompt_tokens
    assert bare == none < tools
    assert mood > bare
    function = {"name": "paint", "arguments": json.dumps({"colour": "purple"})}
    past = [
        *HELLO,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "done"},
    ]
    assert chat(client, max_tokens=1, messages=past, tools=[TOOL]).usage.prompt_tokens > tools


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logit_bias": {"red": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias[...]"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "x"}}},
         "tool_choice"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
    ],
    ids=str,
)  # fmt: skip
def test_features_asked_for_wrongly(
    client: openai.OpenAI, fields: dict[str, Any], param: str
) -> None:
    """The field is named."""
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, **fields)
    assert caught.value.param == param


def test_a_bias_on_no_token_is_refused(stack: RunningStack) -> None:
    """A token that the model does not have cannot be wished for."""
    request = Generate(
        request=stack.client.number(),
        tokens=PROMPT,
        sampling=Sampling(logits_options=LogitsOptions(logit_bias=((10_000, 1.0),))),
    )
    with pytest.raises(UsageError, match="10000"):
        list(stack.client.generate(request))


def ask(stack: RunningStack, **fields: Any) -> tuple[Tokens, str, Any]:
    """Tokens, text and last message of the answer to `HELLO`."""
    request = Generate(
        request=stack.client.number(), messages=[ChatMessage("user", "hello")], **fields
    )
    tokens: Tokens = []
    text = ""
    for message in stack.client.generate(request):
        if not isinstance(message, Text):
            return tokens, text, message
        tokens += message.tokens
        text += message.text
    raise AssertionError("an answer ends with Finished")


def test_an_answer_is_continued(stack: RunningStack) -> None:
    """What the client has already of an answer is not repeated; the rest is the same."""
    whole, text, finished = ask(stack, max_tokens=12)
    rest, _, continued = ask(stack, max_tokens=12 - 5, answer_tokens=whole[:5])
    assert whole[:5] + rest == whole
    assert continued.prompt_tokens == finished.prompt_tokens + 5
    _, _, started = ask(stack, max_tokens=1, answer_start="ab")
    assert started.prompt_tokens > finished.prompt_tokens
    assert text


def test_a_prompt_is_counted(stack: RunningStack) -> None:
    """The count is the prompt's of the request itself, and nothing is generated."""
    tokens, _, finished = ask(stack, max_tokens=4)
    nothing, text, counted = ask(stack, max_tokens=4, count_only=True)
    assert (len(tokens), nothing, text) == (4, [], "")
    assert counted.prompt_tokens == finished.prompt_tokens
    assert stack.client.status().active == 0


def test_the_stop_string_is_reported(stack: RunningStack) -> None:
    """Clients learn which of their stop strings ended an answer."""
    _, text, _ = ask(stack, max_tokens=12)
    _, before, finished = ask(stack, max_tokens=12, stop=["never said", text[4:6]])
    assert (finished.reason, finished.stop_string) == ("stop", text[4:6])
    assert text.startswith(before + text[4:6])


def test_a_forced_call_ends_by_itself(client: openai.OpenAI) -> None:
    """A schema that leaves its object open is closed, so that the model does not go on."""
    schema = {"type": "object", "properties": {"kind": {"enum": ["a", "b"]}}, "required": ["kind"]}
    tool = {"type": "function", "function": {"name": "pick", "parameters": schema}}
    [choice] = chat(client, tools=[tool], tool_choice="required", max_tokens=200).choices
    [call] = choice.message.tool_calls
    assert json.loads(call.function.arguments)["kind"] in ("a", "b")
    assert choice.finish_reason == "tool_calls"
