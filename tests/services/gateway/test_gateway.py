"""The HTTP door, asked by OpenAI's own client and by clients that cannot speak HTTP."""

import contextlib
import http.client
import json
import socket
import tempfile
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import anthropic
import openai
import psutil
import pytest

from launch.settings.settings import StackSettings
from launch.stack.http_listener import HttpListener
from protocol.errors import RuntimeFailure, UsageError
from protocol.messages import Cancel, FromOrchestrator, Generate, Sampling
from protocol.transport.channel import Channel
from protocol.transport.codec import Decoder
from tests.support.stack import (
    DEADLINE_S,
    RunningStack,
    eventually,
    gone,
    held,
    running,
    unwatched_stops,
)
from tests.support.tiny_models import write_endless_model

pytestmark = pytest.mark.processes

KEY = "a-key-for-tests"
HELLO = [{"role": "user", "content": "hello there"}]


@pytest.fixture(scope="module")
def stack() -> Iterator[RunningStack]:
    """One stack with a gateway for all tests of this file."""
    with (
        tempfile.TemporaryDirectory(prefix="ssd-t-") as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("SSD_RUN_DIR", folder)
        target = write_endless_model(Path(folder) / "target", "llama", seed=1)
        draft = write_endless_model(Path(folder) / "draft", "llama", seed=1)
        settings = StackSettings(
            model=str(target),
            draft_model=str(draft),
            http=True,
            port=0,
            api_key=KEY,
            allowed_origins="http://page.example",
            max_body_bytes=20_000,
            max_prompt_tokens=300,
            hang_timeout_s=DEADLINE_S,
        )
        with unwatched_stops(), running(settings) as found:
            yield found


@pytest.fixture(scope="module")
def url(stack: RunningStack) -> str:
    assert stack.supervisor.listener is not None
    return stack.supervisor.listener.url


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=DEADLINE_S
    ) as found:
        yield found


def chat(client: openai.OpenAI, **fields: Any) -> Any:
    """One conversation; `fields` are those of OpenAI, `extra` those that it does not know."""
    extra = fields.pop("extra", None)
    fields = {"model": "target", "messages": HELLO, "max_tokens": 16, **fields}
    return client.chat.completions.create(**fields, extra_body=extra)


def raw(url: str, sent: bytes) -> bytes:
    """What the server says to these bytes before it closes."""
    host, _, port = url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=DEADLINE_S) as connection:
        received = b""
        with contextlib.suppress(OSError):  # the server may have heard enough
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
            while chunk := connection.recv(65536):
                received += chunk
    return received


def post(url: str, path: str, body: Any, **headers: str) -> tuple[int, dict[str, Any]]:
    """Status and JSON of a POST with the right key."""
    host = url.removeprefix("http://")
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    base = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    with contextlib.closing(http.client.HTTPConnection(host, timeout=DEADLINE_S)) as connection:
        connection.request("POST", path, data, {**base, **headers})
        response = connection.getresponse()
        return response.status, json.loads(response.read())


# ---------------------------------------------------------------- answers


def test_a_conversation_is_answered(client: openai.OpenAI, stack: RunningStack) -> None:
    """The text is what the command line would print, with counts, times and speculation."""
    answer = chat(client, extra={"num_draft_tokens": 3})
    expected = stack.answer("hello there", mode="ar", max_tokens=16)
    [choice] = answer.choices
    assert choice.message.content == expected.text
    assert (choice.message.role, choice.finish_reason) == ("assistant", "length")
    assert answer.usage.completion_tokens == 16
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 16
    assert answer.usage.prompt_tokens_details.cached_tokens >= 0
    assert answer.timings["predicted_n"] == 16
    assert answer.timings["draft_kind"] == "mlx"
    assert 0 < answer.ssd["rounds"] <= 16


def test_a_stream_says_the_same(client: openai.OpenAI) -> None:
    """All chunks together are the answer; the last ones have the reason and the counts."""
    whole = chat(client, temperature=0.8, seed=5)
    chunks = list(
        chat(client, temperature=0.8, seed=5, stream=True, stream_options={"include_usage": True})
    )
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 16
    assert {chunk.id for chunk in chunks} == {chunks[0].id}


def test_all_apis_give_the_same_answer(url: str, client: openai.OpenAI) -> None:
    """One model, one prompt, three dialects; the counts agree too."""
    said = chat(client, max_tokens=12)
    text = said.choices[0].message.content
    response = client.responses.create(model="target", input="hello there", max_output_tokens=12)
    with anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0, timeout=DEADLINE_S) as other:
        asked: Any = {"model": "target", "messages": HELLO}
        message = other.messages.create(**asked, max_tokens=12)
        count = other.messages.count_tokens(**asked)
        with other.messages.stream(**asked, max_tokens=12) as stream:
            streamed = "".join(stream.text_stream)
    [block] = message.content
    assert (response.output_text, block.to_dict()["text"], streamed) == (text, text, text)
    assert response.usage is not None
    read = message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)
    assert (response.usage.input_tokens, read) == (said.usage.prompt_tokens,) * 2
    assert count.input_tokens == said.usage.prompt_tokens
    with (
        pytest.raises(anthropic.AuthenticationError),
        anthropic.Anthropic(base_url=url, api_key="wrong", max_retries=0) as stranger,
    ):
        stranger.messages.create(**asked, max_tokens=1)


def test_leaving_frees_a_place_in_every_api(
    url: str, client: openai.OpenAI, stack: RunningStack
) -> None:
    """Whoever stops reading in the middle of a stream is decoded for no longer."""
    with chat(client, stream=True, max_tokens=20_000) as chunks:
        next(iter(chunks))
    eventually(lambda: stack.client.status().active == 0, "the chat was cancelled")
    with client.responses.create(model="target", input="x", stream=True) as events:
        next(iter(events))
    eventually(lambda: stack.client.status().active == 0, "the response was cancelled")
    with (
        anthropic.Anthropic(base_url=url, api_key=KEY, timeout=DEADLINE_S) as other,
        other.messages.stream(model="target", messages=HELLO, max_tokens=20_000) as stream,
    ):
        next(iter(stream))
    eventually(lambda: stack.client.status().active == 0, "the message was cancelled")


def test_a_text_is_continued(client: openai.OpenAI) -> None:
    """Completions take text or tokens, and stream or not."""
    whole = client.completions.create(model="target", prompt="once upon", max_tokens=8)
    chunks = client.completions.create(
        model="target", prompt="once upon", max_tokens=8, stream=True
    )
    text = "".join(chunk.choices[0].text for chunk in chunks)
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == (text, "length")
    tokens = client.completions.create(model="target", prompt=[5, 6, 7], max_tokens=4)
    assert tokens.usage is not None
    assert tokens.usage.prompt_tokens == 3


def test_the_seed_decides(client: openai.OpenAI) -> None:
    """The same seed gives the same answer with and without a drafter; another one does not."""
    plain = chat(client, temperature=1, seed=3, extra={"draft_model": None})
    fast: list[Any] = []

    def drafted() -> bool:
        fast.append(chat(client, temperature=1, seed=3, extra={"num_draft_tokens": 3}))
        return bool(fast[-1].timings["draft_n"] > 0)

    eventually(drafted, "drafts come in time")
    off = chat(client, temperature=1, seed=3, extra={"num_draft_tokens": 0})
    other = chat(client, temperature=1, seed=4)
    texts = [answer.choices[0].message.content for answer in (plain, fast[-1], off, other)]
    assert texts[0] == texts[1] == texts[2] != texts[3]
    assert plain.timings["draft_n"] == off.timings["draft_n"] == 0


def test_several_choices_have_seeds_of_their_own(client: openai.OpenAI) -> None:
    """Choice i is the answer to the same request with the seed plus i, and shares its prompt."""
    prompt = [{"role": "user", "content": "tell me " * 20}]
    fields: dict[str, Any] = {"messages": prompt, "temperature": 1, "max_tokens": 8}
    answer = chat(client, seed=7, n=3, **fields)
    texts = [choice.message.content for choice in answer.choices]
    alone = [chat(client, seed=7 + i, **fields).choices[0].message.content for i in range(3)]
    assert ([choice.index for choice in answer.choices], texts) == ([0, 1, 2], alone)
    assert len(set(texts)) == 3
    assert answer.usage.completion_tokens == 24
    assert [choice.ssd["seed"] for choice in answer.choices] == [7, 8, 9]
    cached = [choice.timings["cache_n"] for choice in answer.choices]
    assert sum(more >= answer.usage.prompt_tokens - 1 for more in cached) >= 2


def test_several_choices_are_streamed(client: openai.OpenAI) -> None:
    """Each chunk says which one it belongs to; all end, and the counts come once."""
    fields: dict[str, Any] = {"temperature": 1, "seed": 7, "n": 2, "max_tokens": 8}
    whole = chat(client, **fields)
    *chunks, last = chat(client, **fields, stream=True, stream_options={"include_usage": True})
    for index, choice in enumerate(whole.choices):
        own = [c.choices[0] for c in chunks if c.choices[0].index == index]
        assert own[0].delta.role == "assistant"
        assert "".join(c.delta.content or "" for c in own) == choice.message.content
        assert [c.finish_reason for c in own if c.finish_reason] == [choice.finish_reason]
    assert (last.choices, last.usage.completion_tokens) == ([], 16)
    assert all(chunk.usage is None for chunk in chunks)


def test_texts_have_choices_too(client: openai.OpenAI) -> None:
    """Completions as well, with their log-probabilities at the right places."""
    asked: dict[str, Any] = {"model": "target", "prompt": "once", "max_tokens": 6, "logprobs": 1}
    whole = client.completions.create(**asked, n=2, temperature=1, seed=3)
    chunks = list(client.completions.create(**asked, n=2, temperature=1, seed=3, stream=True))
    for index, choice in enumerate(whole.choices):
        own = [c.choices[0] for c in chunks if c.choices[0].index == index]
        assert "".join(c.text for c in own) == choice.text
        told = [c.logprobs for c in own if c.logprobs]
        assert choice.logprobs is not None
        assert [t for one in told for t in one.tokens or []] == choice.logprobs.tokens
        offsets = [at for one in told for at in one.text_offset or []]
        assert offsets == choice.logprobs.text_offset


def test_stop_strings_end_an_answer(client: openai.OpenAI) -> None:
    """The answer ends before the stop string, and says that it stopped."""
    text = chat(client).choices[0].message.content
    end = text[len(text) // 2 :][:3]
    answer = chat(client, stop=[end, "never said"])
    assert answer.choices[0].message.content == text[: text.index(end)]
    assert answer.choices[0].finish_reason == "stop"


def test_parts_and_roles_are_understood(client: openai.OpenAI) -> None:
    """A content in parts is their text; a developer is the system."""
    parts = [{"type": "text", "text": "hello "}, {"type": "text", "text": "there"}]
    one = chat(client, messages=[{"role": "user", "content": parts}])
    assert one.choices[0].message.content == chat(client).choices[0].message.content
    assert chat(client, messages=[{"role": "developer", "content": "be kind"}, *HELLO]).id


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"temperature": 3}, "temperature", "invalid_value"),
        ({"extra": {"repetition_penalty": 1e-40}}, "repetition_penalty", "invalid_value"),
        ({"extra": {"stop": "x" * 2000}}, "stop", "invalid_value"),
        ({"n": 129}, "n", "invalid_value"),
        ({"max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"messages": []}, "messages", "invalid_value"),
        ({"logit_bias": {"99999": 1}}, "logit_bias", "invalid_value"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role", "invalid_value"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content",
            "invalid_value",
        ),
    ],
    ids=lambda value: str(value)[:30] if isinstance(value, dict) else "",
)
def test_what_is_wrong_is_named(
    client: openai.OpenAI, fields: dict[str, Any], param: str, code: str
) -> None:
    """An unknown, invalid or unsupported field is an error that names it."""
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, **fields)
    assert (caught.value.param, caught.value.code) == (param, code)


def test_a_refusal_is_an_error_in_a_stream_too(client: openai.OpenAI) -> None:
    """What the orchestrator refuses is a status, not a broken stream."""
    long = [{"role": "user", "content": "word " * 400}]
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match="max_prompt_tokens") as caught:
            chat(client, messages=long, stream=stream)
        assert caught.value.code == "context_length_exceeded"


def test_an_answer_without_an_end_follows_no_schema(client: openai.OpenAI) -> None:
    """A model without a stop token cannot say that the JSON is complete: it is refused."""
    with pytest.raises(openai.BadRequestError, match="eos_token"):
        chat(client, response_format={"type": "json_object"})


def test_other_models_are_not_pretended(client: openai.OpenAI) -> None:
    """There is one pair; asking for another model or drafter says so."""
    with pytest.raises(openai.NotFoundError, match="gpt-x"):
        chat(client, model="gpt-x")
    with pytest.raises(openai.NotFoundError, match="other-drafter"):
        chat(client, extra={"draft_model": "other-drafter"})
    assert [model.id for model in client.models.list()] == ["target"]
    assert client.models.retrieve("target").id == "target"


def test_strangers_stay_outside(url: str, client: openai.OpenAI) -> None:
    """Without the right key there is no answer; nothing of the request is looked at."""
    for key in ("", "wrong", KEY + "x"):
        status, body = post(url, "/v1/chat/completions", b"{", Authorization=f"Bearer {key}")
        assert (status, body["error"]["code"]) == (401, "invalid_api_key")
    with pytest.raises(openai.AuthenticationError):
        chat(client.with_options(api_key="wrong"))


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        (b"{", {}, 400),
        (b"", {}, 400),
        (b"[]", {}, 400),
        (b'{"messages": [\xff]}', {}, 400),
        (b"[" * 10_000, {}, 400),
        (b"{}", {"Content-Type": "text/plain"}, 415),
        (b" " * 30_000, {}, 413),
    ],
    ids=["cut", "empty", "list", "not utf-8", "deep", "not json", "large"],
)
def test_malformed_bodies_are_refused(
    url: str, body: bytes, headers: dict[str, str], status: int
) -> None:
    """Each gets OpenAI's error object with the status that fits, and harms nobody."""
    got, answer = post(url, "/v1/chat/completions", body, **headers)
    assert got == status
    assert answer["error"]["message"]


@pytest.mark.parametrize(
    "sent",
    [
        b"\x00\x01\x02\x03\r\n\r\n",
        b"GET\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"GET /nowhere HTTP/9.9\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 200_000 + b"\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
    ids=["bytes", "no path", "negative", "version", "long header", "bad chunk"],
)
def test_nonsense_is_no_request(url: str, client: openai.OpenAI, sent: bytes) -> None:
    """Bytes that are no HTTP get a client error or a closed door; the server serves on."""
    answer = raw(url, sent)
    assert answer == b"" or answer.split(b" ", 2)[1].startswith(b"4")
    assert chat(client, max_tokens=1).id


def test_unknown_paths_and_methods_are_errors(url: str) -> None:
    """They too get the error object."""
    assert post(url, "/v1/embeddings", {})[0] == 404
    status, body = post(url, "/v1/models", {})
    assert (status, body["error"]["code"]) == (405, "unknown_url")


def test_pages_need_permission(url: str) -> None:
    """A browser is told which pages may read answers."""
    host = url.removeprefix("http://")

    def allowed(origin: str) -> str | None:
        with contextlib.closing(http.client.HTTPConnection(host, timeout=DEADLINE_S)) as connection:
            wanted = {"Origin": origin, "Access-Control-Request-Method": "POST"}
            connection.request("OPTIONS", "/v1/chat/completions", headers=wanted)
            return connection.getresponse().getheader("access-control-allow-origin")

    assert allowed("http://page.example") == "http://page.example"
    assert allowed("http://evil.example") is None


def test_a_full_line_is_said(client: openai.OpenAI, stack: RunningStack) -> None:
    """Beyond those that are decoded and those in line, a request is refused, to be tried later."""
    settings = StackSettings()
    places = 16 * settings.decode_concurrency + settings.max_waiting  # more than there are
    busy = [
        Generate(request=number, tokens=[5], max_tokens=20_000, mode="ar")
        for number in range(1, places + 1)
    ]
    crowd: Channel[FromOrchestrator] = Channel(
        stack.supervisor.run_dir.clients_address, Decoder(FromOrchestrator)
    )
    with crowd, held(stack, "verifier"):
        eventually(partial(_fill, stack, crowd, busy, deque(maxlen=20)), "the line is full")
        for stream in (False, True):
            with pytest.raises(openai.RateLimitError) as caught:
                chat(client, stream=stream)
            assert caught.value.code == "server_busy"
            assert int(caught.value.response.headers["retry-after"]) >= 1
        for request in busy:
            crowd.send(Cancel(request=request.request))
        eventually(lambda: _counts(stack) == (0, 0), "all were cancelled")
    assert chat(client).id


def _fill(
    stack: RunningStack,
    crowd: Channel[FromOrchestrator],
    busy: list[Generate],
    counts: deque[tuple[int, int]],
) -> bool:
    """Send again what was refused; True once nobody has left the full line for a while."""
    with contextlib.suppress(RuntimeFailure):  # it has not read the last ones yet
        for request in busy:
            crowd.send(request)
    counts.append(_counts(stack))
    is_settled = len(counts) == counts.maxlen and len(set(counts)) == 1
    return is_settled and counts[-1][1] >= StackSettings().max_waiting


def _counts(stack: RunningStack) -> tuple[int, int]:
    status = stack.client.status()
    return status.active, status.waiting


# ---------------------------------------------------------------- life


def test_a_client_that_leaves_frees_its_place(
    url: str, client: openai.OpenAI, stack: RunningStack
) -> None:
    """Leaving cancels at once, streaming or not: nothing is decoded for nobody."""
    with chat(client, max_tokens=20_000, stream=True) as stream:
        next(iter(stream))
    eventually(lambda: stack.client.status().active == 0, "the stream was cancelled")
    host, _, port = url.removeprefix("http://").partition(":")
    body = json.dumps({"messages": HELLO, "max_tokens": 20_000}).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {KEY}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection((host, int(port)), timeout=DEADLINE_S) as connection:
        connection.sendall(head.encode() + body)
        eventually(lambda: stack.client.status().active == 1, "the request runs")
    eventually(lambda: stack.client.status().active == 0, "the request was cancelled")


def test_many_requests_are_not_mixed_up(client: openai.OpenAI, stack: RunningStack) -> None:
    """Fifty at once: each gets the answer to its own question, none is lost."""
    prompts = [f"question {number}" for number in range(50)]
    with ThreadPoolExecutor(50) as pool:
        answers = list(
            pool.map(
                lambda prompt: chat(
                    client,
                    messages=[{"role": "user", "content": prompt}],
                    max_tokens=6,
                    stream=False,
                    temperature=1,
                    seed=1,
                ),
                prompts,
            )
        )
    alone = [
        stack.answer(p, mode="ar", sampling=Sampling(temperature=1, seed=1), max_tokens=6).text
        for p in prompts[::10]
    ]
    texts = [answer.choices[0].message.content for answer in answers]
    assert texts[::10] == alone
    assert len({answer.id for answer in answers}) == 50


def test_health_and_metrics_tell_the_truth(url: str, stack: RunningStack) -> None:
    """Health needs no key and names the processes; the counters are those of the answers."""
    host = url.removeprefix("http://")

    def get(path: str) -> tuple[int, str]:
        with contextlib.closing(http.client.HTTPConnection(host, timeout=DEADLINE_S)) as connection:
            connection.request("GET", path, headers={"Authorization": f"Bearer {KEY}"})
            response = connection.getresponse()
            return response.status, response.read().decode()

    status, body = get("/health")
    assert (status, json.loads(body)["status"]) == (200, "ok")

    def count(name: str) -> float:
        lines = get("/metrics")[1].splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))

    # A fixed lookahead: the planner might not draft.
    drafted = {"prompt": "x", "max_tokens": 64, "num_draft_tokens": 3}

    def accepted() -> bool:
        post(url, "/v1/completions", drafted)
        return count("ssd_spec_decode_num_accepted_tokens_total") > 0

    eventually(accepted, "drafts come in time")
    before = count("ssd_generation_tokens_total")
    post(url, "/v1/completions", {"prompt": "x", "max_tokens": 9})
    assert count("ssd_generation_tokens_total") == before + 9
    for name in ("drafts", "draft_tokens", "accepted_tokens", "accepted_tokens_per_pos"):
        assert count(f"ssd_spec_decode_num_{name}_total") > 0
    assert count("ssd_time_to_first_token_seconds_count") > 0
    assert count('ssd_round_seconds_bucket{le="+Inf",phase="verify"}') > 0
    assert count('ssd_round_seconds_bucket{le="+Inf",phase="verify"}') == count(
        'ssd_round_seconds_count{phase="verify"}'
    )

    def told() -> bool:
        post(url, "/v1/completions", {"prompt": "x", "max_tokens": 9})
        return bool(json.loads(get("/health")[1])["stack"]["window"]["tokens"] >= 9)

    eventually(told, "it is asked within the ten seconds that are of late")
    # Nothing runs now, so the plan does not change between these questions.
    assert (count("ssd_lookahead") > 0) == (count("ssd_fan_out") > 0) == count("ssd_speculating")


def test_a_gateway_that_dies_is_replaced(stack: RunningStack, url: str) -> None:
    """Its door stays open: a connection that comes meanwhile waits for the next gateway."""
    children = psutil.Process().children()
    [gateway] = [child for child in children if "ssd gateway" in child.cmdline()[:1]]
    gateway.kill()
    eventually(lambda: gone([gateway.pid]), "it is dead")
    status, answer = post(url, "/v1/completions", {"prompt": "x", "max_tokens": 2})
    assert (status, answer["usage"]["completion_tokens"]) == (200, 2)


def test_a_public_address_needs_a_key() -> None:
    """Listening where others can connect is refused without a key, and allowed with one."""
    with pytest.raises(UsageError, match="API key"):
        HttpListener(StackSettings(host="0.0.0.0", port=0))  # noqa: S104
    with HttpListener(StackSettings(host="0.0.0.0", port=0, api_key=KEY)):  # noqa: S104
        pass


def test_a_taken_port_is_a_usage_error(url: str) -> None:
    """The sentence has the address in it."""
    port = int(url.rsplit(":", 1)[1])
    with pytest.raises(UsageError, match=f"127.0.0.1:{port}"):
        HttpListener(StackSettings(port=port))
