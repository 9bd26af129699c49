"""Requests as clients of other servers send them, and the ranges that APIs publish."""

import contextlib
import gzip
import http.client
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from protocol.messages import Generate
from services.gateway.paths import normalise_path
from tests.services.gateway.scripted import ScriptedClient, serving, write_template

PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}{{ tools }}"
CHAT, TEXT, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
RESPONSES = "/v1/responses"
JSON = {"Content-Type": "application/json"}
HELLO = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "look"}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
LEAST: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HELLO},
    TEXT: {"prompt": "once"},
    MESSAGES: {"messages": HELLO, "max_tokens": 5},
    RESPONSES: {"input": "hello"},
}


class Response(NamedTuple):
    """An answer over HTTP."""

    status: int
    headers: http.client.HTTPMessage
    text: str


class Server:
    """A gateway, and what its model was asked."""

    def __init__(self, url: str, stub: ScriptedClient) -> None:
        self._line = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
        self._stub = stub
        self.texts = ["said"]
        """What the model says, again and again."""

    @property
    def last(self) -> Generate:
        """What the model was asked for last."""
        return self._stub.requests[-1]

    def post(self, path: str, fields: dict[str, Any]) -> Response:
        body = {**LEAST.get(normalise_path(path), {}), **fields}
        return self.post_bytes(path, json.dumps(body).encode())

    def post_bytes(self, path: str, body: bytes, headers: dict[str, str] = JSON) -> Response:
        self._stub.texts = self.texts * 128
        self._line.request("POST", path, body, headers)
        return self._read()

    def get(self, path: str) -> Response:
        self._line.request("GET", path)
        return self._read()

    def _read(self) -> Response:
        response = self._line.getresponse()
        return Response(response.status, response.headers, response.read().decode())

    def close(self) -> None:
        self._line.close()

    def ask(self, path: str, **fields: Any) -> Generate:
        """What the model is asked for."""
        response = self.post(path, fields)
        assert response.status == 200, (fields, response.text)
        return self.last


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    stub = ScriptedClient()
    folder: Path = write_template(tmp_path_factory.mktemp("model"), PLAIN)
    with serving(stub, folder) as url, contextlib.closing(Server(url, stub)) as server:
        yield server


FLAT_TOOL = {"type": "function", **TOOL["function"]}
CALL = {"id": None, "index": 0, "function": {"arguments": "{}"}}
RESULT = {"type": "tool_result", "tool_use_id": "t", "content": 42}

ACCEPTED: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": [{"role": "user", "content": None}]}),
    (CHAT, {"messages": [{"role": "user"}]}),
    (CHAT, {"messages": [*HELLO, {"role": "assistant", "content": None}, *HELLO]}),
    (CHAT, {"messages": [{"role": "system", "content": None}, *HELLO]}),
    (CHAT, {"stop": None}),
    (CHAT, {"stop": []}),
    (CHAT, {"stop": "x"}),
    (CHAT, {"stop": ["x", ""]}),
    (CHAT, {"max_tokens": None, "n": None, "seed": None, "logit_bias": None, "tools": None}),
    (CHAT, {"max_tokens": -1}),
    (CHAT, {"max_tokens": 5.0, "seed": "7", "top_k": 40.0, "temperature": "0.5", "n": 1e0}),
    (CHAT, {"logit_bias": {"5": "1", "6": None}, "stop": ["x", None], "stream": 0}),
    (CHAT, {"tools": [None, TOOL], "messages": [*HELLO, None, *HELLO]}),
    (TEXT, {"n_predict": 4.0, "logprobs": "2", "top_p": "0.9"}),
    (MESSAGES, {"max_tokens": "5", "stop_sequences": ["x", None]}),
    (RESPONSES, {"max_output_tokens": 5.0, "metadata": {"a": None}}),
    (CHAT, {"n_predict": -1, "cache_prompt": True, "id_slot": -1, "keep_alive": "5m"}),
    (CHAT, {"top_logprobs": -1}),
    (CHAT, {"top_logprobs": -1, "logprobs": False}),
    (CHAT, {"logprobs": True, "top_logprobs": 11}),
    (CHAT, {"logprobs": 3}),
    (CHAT, {"stream_options": {"include_usage": True}}),
    (CHAT, {"model": "default_model", "draft_model": "default_model", "adapters": None}),
    (CHAT, {"num_draft_tokens": 100, "xtc_probability": 0.0, "repetition_context_size": 20}),
    (CHAT, {"tools": [TOOL], "tool_choice": "any"}),
    (CHAT, {"tools": [TOOL], "tool_choice": {"type": "auto"}}),
    (CHAT, {"response_format": {"type": "text"}}),
    (TEXT, {"logprobs": True}),
    (TEXT, {"logprobs": False}),
    (TEXT, {"logprobs": True, "top_logprobs": 4}),
    (TEXT, {"stream_options": {"include_usage": True}, "best_of": 1, "suffix": None}),
    (TEXT, {"n_predict": 4, "samplers": ["top_k"], "mirostat": 0, "repeat_last_n": 64}),
    (MESSAGES, {"top_p": 0, "top_k": 0, "stop_sequences": [], "metadata": {"user_id": "a"}}),
    (CHAT, {"messages": [{"role": "user", "content": {"type": "text", "text": "a"}}]}),
    (CHAT, {"messages": [{"role": "user", "content": ["a", {"type": "text", "text": "b"}]}]}),
    (CHAT, {"messages": [*HELLO, {"role": "assistant", "tool_calls": [CALL]}, *HELLO]}),
    (CHAT, {"stream_options": {"include_usage": None}, "model": ""}),
    (CHAT, {"tools": [FLAT_TOOL], "tool_choice": {"type": "function", "name": "look"}}),
    (CHAT, {"functions": [TOOL["function"]], "function_call": {"name": "look"}}),
    (MESSAGES, {"messages": [*HELLO, {"role": "assistant", "content": None}, *HELLO]}),
    (MESSAGES, {"messages": [*HELLO, {"role": "user", "content": [RESULT, "a"]}]}),
    (MESSAGES, {"system": {"type": "text", "text": "a"}}),
    (RESPONSES, {"input": ["a", {"role": "user", "content": {"type": "input_text", "text": "b"}}]}),
    (RESPONSES, {"tools": [TOOL], "tool_choice": "required"}),
    (RESPONSES, {"tool_choice": "auto", "metadata": {}, "truncation": "auto", "user": "me"}),
]


def test_what_other_servers_accept_is_accepted(server: Server) -> None:
    """It acts as there, or the answer's header names it."""
    for path, fields in ACCEPTED:
        server.ask(path, **fields)
    ignored = server.post(CHAT, {"cache_prompt": True, "stream_options": {"include_usage": True}})
    assert ignored.headers["X-Ignored-Fields"] == "cache_prompt, stream_options"


def test_half_a_character_does_not_lock_a_conversation(server: Server) -> None:
    """A client that cut a text within a pair of surrogates sends it again with every turn."""
    text = rb"a\\ud83d \ud83d \ud83d\ude00 \ude00\\"
    body = b'{"messages": [{"role": "user", "content": "%s"}]}' % text
    assert server.post_bytes(CHAT, body).status == 200
    assert server.last.messages[-1].content == "a\\ud83d \ufffd \U0001f600 \ufffd\\"
    assert server.post_bytes(CHAT, body[:-1]).status == 400


def test_functions_are_called_as_before_tools(server: Server) -> None:
    """The answer has `function_call`, one at most, whole and in a stream."""
    server.texts = ['<tool_call>{"name": "look", "arguments": {}}</tool_call>']
    fields = {"functions": [TOOL["function"]], "function_call": "auto"}
    [choice] = json.loads(server.post(CHAT, fields).text)["choices"]
    assert choice["message"]["function_call"] == {"name": "look", "arguments": "{}"}
    assert (choice["finish_reason"], "tool_calls" in choice["message"]) == ("function_call", False)
    stream = server.post(CHAT, {**fields, "stream": True}).text
    assert '"function_call":{"name":"look","arguments":"{}"}' in stream
    assert '"finish_reason":"function_call"' in stream
    server.texts = ["said"]
    assert "{" not in server.ask(CHAT, **{**fields, "function_call": "none"}).messages[0].content


def test_what_would_change_the_answer_is_not_dropped(server: Server) -> None:
    """A schema in another place holds; a conversation that is stored elsewhere is an error."""
    form = {"type": "json_schema", "schema": {"type": "object", "properties": {"a": {}}}}
    options = server.ask(MESSAGES, output_format=form).sampling.logits_options
    assert options is not None
    assert '"a"' in options.grammar
    for name in ("messages", "tools", "add_generation_prompt"):
        response = server.post(CHAT, {"chat_template_kwargs": {name: []}})
        assert (response.status, f"itself sets '{name}'" in response.text) == (400, True)
    for field in ("conversation", "prompt"):
        response = server.post(RESPONSES, {field: {"id": "x_1"}})
        assert (response.status, field in response.text) == (400, True)


def test_values_act_as_there(server: Server) -> None:
    """Filters that keep one token, penalties that are off, other names, pairs of a bias."""
    sampling = server.ask(CHAT, top_p=0, min_p=1, temperature=2).sampling
    assert (sampling.top_p < 1e-3, sampling.min_p > 0.999, sampling.temperature) == (True, True, 2)
    assert server.ask(CHAT, repetition_penalty=0).sampling.logits_options is None
    options = server.ask(CHAT, repeat_penalty=1.5).sampling.logits_options
    assert options is not None
    assert options.repetition_penalty == 1.5
    options = server.ask(TEXT, logit_bias=[[5, 1.5], [6, False], [7, True]]).sampling.logits_options
    assert options is not None
    assert options.logit_bias == ((5, 1.5), (6, -100.0))
    assert server.ask(CHAT, n_predict=7).max_tokens == 7
    assert server.ask(CHAT, n_predict=7, max_tokens=8).max_tokens == 8
    assert server.ask(CHAT, logprobs=True, top_logprobs=3).sampling.logprobs == 3
    assert server.ask(CHAT, logprobs=True, top_logprobs=-1).sampling.logprobs == 0
    assert server.ask(CHAT, top_logprobs=-1).sampling.logprobs is None
    assert server.ask(TEXT, logprobs=0).sampling.logprobs == 0
    assert server.ask(TEXT, logprobs=False).sampling.logprobs is None
    assert server.ask(CHAT, num_draft_tokens=100).num_draft_tokens == 64


def test_a_seed_of_minus_one_is_random(server: Server) -> None:
    """As for llama.cpp; any other seed is the same every time."""
    for path in (CHAT, TEXT, RESPONSES):
        drawn = {server.ask(path, seed=-1).sampling.seed for _ in range(4)}
        assert len(drawn) > 1
        assert len({server.ask(path, seed=-2).sampling.seed for _ in range(2)}) == 1


def test_schemas_come_in_several_places(server: Server) -> None:
    """Whichever field holds the schema, the answer is bound to it."""
    named = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
    expected = _grammar(server.ask(CHAT, response_format=named))
    assert expected != _grammar(server.ask(CHAT, response_format={"type": "json_object"}))
    for kind in ("json_object", "json_schema"):
        wanted = {"type": kind, "schema": SCHEMA}
        assert _grammar(server.ask(CHAT, response_format=wanted)) == expected
        assert _grammar(server.ask(RESPONSES, text={"format": wanted})) == expected
    for path in (CHAT, TEXT):
        assert _grammar(server.ask(path, json_schema=SCHEMA)) == expected


def _grammar(request: Generate) -> str:
    options = request.sampling.logits_options
    return options.grammar if options else ""


def test_a_call_of_any_tool_may_be_forced(server: Server) -> None:
    """By the word of every API."""
    expected = _grammar(server.ask(CHAT, tools=[TOOL], tool_choice="required"))
    for choice in ("any", {"type": "any"}, {"type": "required"}):
        assert _grammar(server.ask(CHAT, tools=[TOOL], tool_choice=choice)) == expected != ""
    assert not server.ask(CHAT, tools=[TOOL], tool_choice={"type": "none"}).tools


RANGES: list[tuple[str, str, list[Any], list[Any]]] = [
    (CHAT, "temperature", [0, 2], [-0.1, 2.1]),
    (CHAT, "top_p", [0, 1], [-0.1, 1.1]),
    (CHAT, "presence_penalty", [-2, 2], [-2.1, 2.1]),
    (CHAT, "frequency_penalty", [-2, 2], [-2.1, 2.1]),
    (
        CHAT,
        "logit_bias",
        [{"5": -100}, {"5": 100}],
        [{"5": -101}, {"5": 101}, {"x": 1}, [["a", 1]]],
    ),
    (CHAT, "n", [1, 128], [0, 129]),
    (CHAT, "stop", ["a" * 1024, ["a"] * 16], ["a" * 1025, ["a"] * 17]),
    (CHAT, "max_tokens", [1, -1], [0, -2]),
    (CHAT, "max_completion_tokens", [1, -1], [0, -2]),
    (CHAT, "top_k", [-1, 0], [-2]),
    (CHAT, "min_p", [0, 1], [-0.1, 1.1]),
    (CHAT, "repetition_penalty", [0, 0.1, 10], [-1, 0.05, 10.1]),
    (CHAT, "seed", [-(2**63), 2**63 - 1], ["a"]),
    (TEXT, "temperature", [0, 2], [-0.1, 2.1]),
    (TEXT, "logprobs", [0, 5], [-1, 6]),
    (TEXT, "top_p", [0, 1], [-0.1, 1.1]),
    (MESSAGES, "temperature", [0, 1], [-0.1, 1.1]),
    (MESSAGES, "top_p", [0, 1], [-0.1, 1.1]),
    (MESSAGES, "top_k", [0, 500], [-1]),
    (MESSAGES, "max_tokens", [1], [0, -1]),
    (RESPONSES, "temperature", [0, 2], [-0.1, 2.1]),
    (RESPONSES, "top_p", [0, 1], [-0.1, 1.1]),
    (RESPONSES, "max_output_tokens", [1], [0]),
]
"""Both ends of each range, and what is just beyond them."""


def test_published_ranges_are_enforced(server: Server) -> None:
    """The ends are accepted; beyond them is an error 400 that names the field."""
    for path, field, inside, outside in RANGES:
        for value in inside:
            server.ask(path, **{field: value})
        for value in outside:
            response = server.post(path, {field: value})
            assert response.status == 400, (field, value)
            assert field in response.text
    for best, status in ((0, 200), (20, 200), (21, 400)):
        fields = {"logprobs": True, "top_logprobs": best}
        assert server.post(CHAT, fields).status == status


def read_guide() -> Iterator[tuple[str, str]]:
    """Field and range of each row of the guide's table."""
    page = (Path(__file__).parents[3] / "docs/guide/server.md").read_text(encoding="utf-8")
    table = page.partition("| field | range |")[2].partition("\n\n")[0]
    for line in table.splitlines()[2:]:
        _, fields, text, _ = line.split("|")
        for field in fields.split(","):
            yield field.strip(" `"), text.strip()


def _shape(field: str, value: float) -> dict[str, Any]:
    number = int(value) if value == int(value) else value
    if field == "logit_bias":
        return {field: {"5": number}}
    return {field: number, "logprobs": True} if field == "top_logprobs" else {field: number}


def test_the_guides_ranges_are_enforced(server: Server) -> None:
    """Both ends of each range that the guide gives are accepted, and nothing beyond them."""
    rows = dict(read_guide())
    assert {"temperature", "n", "seed"} <= rows.keys()
    for field, text in rows.items():
        for special in re.findall(r"(-?\d+)(?: and (-?\d+))?:", text):
            for value in filter(None, special):
                assert server.post(CHAT, _shape(field, int(value))).status == 200, (field, value)
        if found := re.match(r"(-?[\d.]+) to (-?[\d.]+)", text):
            low, high = float(found[1]), float(found[2])
            step = 1 if field in ("n", "top_logprobs") else 0.01
            named = {int(value) for value in re.findall(r"(-?\d+):", text)}
            for value, fits in ((low, 1), (high, 1), (low - step, 0), (high + step, 0)):
                if value not in named:
                    status = server.post(CHAT, _shape(field, value)).status
                    assert status == (200 if fits else 400), (field, value)
    assert rows["stop"] == "16 strings of 1,024 characters"  # tried in the table above


def test_bodies_and_paths_as_they_come(server: Server) -> None:
    """A byte order mark, a slash at the end, no /v1 or two of them."""
    body = b"\xef\xbb\xbf" + json.dumps(LEAST[CHAT]).encode()
    assert server.post_bytes(CHAT, body).status == 200
    for path in LEAST:
        for written in (
            f"{path}/",
            path.removeprefix("/v1"),
            f"/v1{path}",
            f"/{path}",
            f"/{path.replace('/', '//')}",
        ):
            assert server.post(written, {}).status == 200, written
    for path in ("/models", "/v1/models/", "/models/large", "/health/", "/v1/health"):
        assert server.get(path).status != 404, path
    assert normalise_path("/v1/models//folder/large") == "/v1/models//folder/large"
    assert server.get("/").headers["content-type"].startswith("text/html")
    assert server.get("/v1/nothing").status == 404
    headers = {**JSON, "Content-Encoding": "gzip"}
    refused = server.post_bytes(CHAT, gzip.compress(body), headers)
    assert (refused.status, "'gzip' is not read here" in refused.text) == (415, True)
