"""What large bodies keep from the others: neither the loop, nor copies of a prompt."""

import asyncio
import json
import threading
import urllib.request
from typing import Any

import pytest

from protocol.process.step_times import StepTimes
from services.gateway.http.large_bodies import LARGE_BYTES, LargeBodies
from services.gateway.http.loop import AwakeLoop
from tests.services.gateway.scripted import ScriptedClient, serving

LONG = "word " * LARGE_BYTES


def post(url: str, **fields: Any) -> dict[str, Any]:
    body = json.dumps({"messages": [{"role": "user", "content": LONG}], **fields}).encode()
    request = urllib.request.Request(  # noqa: S310  # our own server
        f"{url}/v1/chat/completions", body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:  # noqa: S310
        answer: dict[str, Any] = json.load(response)
    return answer


def test_the_loop_goes_on_while_a_large_body_is_read() -> None:
    """The work ends only once the loop has done something else; small bodies are read at once."""
    elsewhere = threading.Event()

    async def read() -> tuple[bool, bool]:
        with LargeBodies() as bodies:
            asyncio.get_running_loop().call_soon(elsewhere.set)
            small = await bodies.read(LARGE_BYTES - 1, elsewhere.is_set)
            return small, await bodies.read(LARGE_BYTES, elsewhere.wait, 60.0)

    assert asyncio.run(read()) == (False, True)


def test_errors_of_the_reader_are_those_of_the_request() -> None:
    """They come through the thread."""

    async def read() -> None:
        with LargeBodies() as bodies:
            await bodies.read(LARGE_BYTES, int, "no number")

    with pytest.raises(ValueError, match="no number"):
        asyncio.run(read())


def test_a_long_prompt_is_sent_once() -> None:
    """It is tokenised before, and its choices ask with its tokens and seeds of their own."""
    client = ScriptedClient("one", "two", "three")
    with serving(client) as url:
        answer = post(url, n=3)
    texts = [choice["message"]["content"] for choice in answer["choices"]]
    assert sorted(texts) == ["one", "three", "two"]
    question, *asked = client.requests
    assert question.count_only
    assert question.messages[0].content == LONG
    assert [(one.tokens, one.messages) for one in asked] == [([1, 2, 3], [])] * 3
    assert len({one.sampling.seed for one in asked}) == 3
    assert len({one.group for one in asked}) == 1


def test_one_answer_takes_one_message() -> None:
    """Nothing is asked before."""
    client = ScriptedClient("one")
    with serving(client) as url:
        post(url)
    assert [request.count_only for request in client.requests] == [False]


def test_the_loop_measures_its_steps() -> None:
    """Work of a task is part of a step, and what a step waits for is none."""
    times = {"cpu": 0.0}
    steps = StepTimes(lambda: times["cpu"], lambda: 0.0)

    async def work() -> None:
        times["cpu"] += 0.2
        await asyncio.sleep(0)
        times["cpu"] += 0.3
        await asyncio.sleep(0)

    with asyncio.Runner(loop_factory=lambda: AwakeLoop(steps)) as runner:
        runner.run(work())
    assert round(steps.longest_s, 3) == 0.3
