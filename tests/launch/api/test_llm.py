"""The Python API: load once, answer many times, leave nothing."""

import asyncio
import contextlib
import doctest
import json
import tempfile
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any, cast

import psutil
import pytest

import launch.api.llm
import launch.api.sampling_params
import ssd_decode
from protocol.errors import UsageError
from ssd_decode import LLM, Finished, SamplingParams, Text
from tests.support.stack import leftovers
from tests.support.tiny_models import write_tiny_model

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with (
        tempfile.TemporaryDirectory(prefix="ssd-t-") as folder,
        tempfile.TemporaryDirectory(prefix="ssd-m-") as models,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("SSD_RUN_DIR", folder)
        target = write_tiny_model(Path(models) / "t", "llama", seed=1)
        draft = write_tiny_model(Path(models) / "d", "llama", seed=1)
        with LLM(str(target), str(draft)) as loaded:
            yield loaded
        assert leftovers(Path(folder)) == []
        assert psutil.Process().children(recursive=True) == []


def test_answers_are_the_same_in_every_mode(llm: LLM) -> None:
    """The pair is loaded once, and the seed alone decides the answer."""
    params = {"temperature": 0.8, "seed": 3, "max_tokens": 24}
    plain = llm.generate(["one", "two"], SamplingParams(mode="ar", **params))
    fast = llm.generate(["one", "two"], SamplingParams(mode="ssd", **params))
    assert [answer.tokens for answer in plain] == [answer.tokens for answer in fast]
    assert all(answer.seed == 3 for answer in fast)


def test_many_prompts_keep_their_order(llm: LLM) -> None:
    """More prompts than the stack takes at once: each answer stands where its prompt does."""
    prompts = [f"prompt {number}" for number in range(24)]
    params = SamplingParams(max_tokens=5, temperature=1, seed=1)
    answers = llm.generate(prompts, params)
    alone = [llm.generate(prompt, params)[0] for prompt in prompts[::8]]
    assert [answer.tokens for answer in answers[::8]] == [answer.tokens for answer in alone]


def test_conversations_are_prompts(llm: LLM) -> None:
    """One conversation is one prompt; a text is what the user says."""
    talk = [{"role": "user", "content": "hello"}]
    params = SamplingParams(max_tokens=6)
    [answer] = llm.generate(talk, params)
    assert answer.tokens == llm.generate("hello", params)[0].tokens
    assert len(llm.generate([talk, "hello", [{"role": "system", "content": "x"}, *talk]])) == 3
    with pytest.raises(UsageError, match="mix strings and messages"):
        llm.generate(cast("Any", ["hello", *talk]))


def test_a_stream_ends_with_statistics_and_can_be_left(llm: LLM) -> None:
    """Text events, then Finished; leaving early cancels, and the next request is served."""
    *texts, end = llm.stream("hello", SamplingParams(max_tokens=8))
    assert isinstance(end, Finished)
    assert sum(len(event.tokens) for event in texts if isinstance(event, Text)) <= 8
    early = llm.stream("hello", SamplingParams(max_tokens=400))
    next(early)
    early.close()
    assert len(llm.generate(["hello"], SamplingParams(max_tokens=4))) == 1


def test_streams_can_be_read_by_turns(llm: LLM) -> None:
    """Two open streams do not take each other's words."""
    params = SamplingParams(max_tokens=12, temperature=1, seed=5)
    streams = [llm.stream(prompt, params) for prompt in ("one", "two")]
    texts = ["", ""]
    for events in zip_longest(*streams):
        for index, event in enumerate(events):
            texts[index] += event.text if isinstance(event, Text) else ""
    assert texts == [answer.text for answer in llm.generate(["one", "two"], params)]


def test_the_async_twins_say_the_same(llm: LLM) -> None:
    """agenerate and astream give the answers of generate, many at once, and can be left."""
    params = SamplingParams(max_tokens=8, temperature=1, seed=2)
    prompts = [f"prompt {number}" for number in range(20)]

    async def ask() -> tuple[list[Any], list[Any]]:
        events = [event async for event in llm.astream("hello", params)]
        async with contextlib.aclosing(
            llm.astream("hello", SamplingParams(max_tokens=400))
        ) as left:
            await anext(left)
        return await llm.agenerate(prompts, params), events

    answers, events = asyncio.run(ask())
    assert [a.tokens for a in answers] == [a.tokens for a in llm.generate(prompts, params)]
    assert isinstance(events[-1], Finished)
    assert "".join(e.text for e in events[:-1]) == llm.generate("hello", params)[0].text


def test_features_have_their_parameters(llm: LLM) -> None:
    """Schema, log-probabilities, bias and penalties are those of the stack."""
    schema = {
        "type": "object",
        "properties": {"ready": {"type": "boolean"}},
        "required": ["ready"],
        "additionalProperties": False,
    }
    [answer] = llm.generate("hello", SamplingParams(json_schema=schema, logprobs=1))
    assert isinstance(json.loads(answer.text)["ready"], bool)
    assert len(answer.logprobs) == len(answer.tokens)
    [biased] = llm.generate("x", SamplingParams(logit_bias={77: 100.0}, max_tokens=3))
    assert biased.tokens == [77, 77, 77]
    penalised = SamplingParams(repetition_penalty=1.5, frequency_penalty=0.5, max_tokens=20)
    assert (
        llm.generate("x", penalised)[0].tokens
        != llm.generate("x", SamplingParams(max_tokens=20))[0].tokens
    )


def test_presets_are_parameters() -> None:
    """A preset is a start; what is given besides wins."""
    assert SamplingParams.preset("default") == SamplingParams.preset("greedy") == SamplingParams()
    assert SamplingParams.preset("creative", top_p=0.5, seed=1).top_p == 0.5
    assert SamplingParams.preset("conservative").temperature == 0.3


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"temperature": -1}, "temperature must be at least 0"),
        ({"top_p": 2.0}, "top_p must be at most 1"),
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"logprobs": 21}, "logprobs must be at most 20"),
        ({"frequency_penalty": 3.0}, "frequency_penalty must be at most 2"),
        ({"mode": "fast"}, "mode cannot be 'fast'"),
        ({"draft_temp": -1.0}, "draft_temp must be at least 0"),
        ({"json_schema": {"type": "colour"}}, "schema"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_values_out_of_range_are_refused(values: dict[str, Any], sentence: str) -> None:
    """Where they are given, in words, with the parameter's name."""
    with pytest.raises(UsageError, match=sentence):
        SamplingParams(**values)


def test_an_unknown_preset_is_refused() -> None:
    """With those that there are."""
    with pytest.raises(UsageError, match="there is no preset 'wild'; known: default, "):
        SamplingParams.preset(cast("Any", "wild"))


def test_parameters_are_no_dictionary(llm: LLM) -> None:
    """What other libraries take as a dict has a type here, and the error names it."""
    with pytest.raises(UsageError, match=r"must be SamplingParams\(...\), not dict"):
        llm.generate("x", cast("Any", {"max_tokens": 3}))


def test_after_close_there_is_one_sentence() -> None:
    """Not a wait for an orchestrator that is gone."""
    closed = LLM.__new__(LLM)
    closed._closed = True
    for ask in (closed.generate, closed.stream, closed.astream):
        with pytest.raises(UsageError, match="this LLM is closed"):
            ask("x")


def test_answers_read_as_those_of_other_engines(llm: LLM) -> None:
    """`["text"]`, `["token_ids"]`, and a line that sums up."""
    [answer] = llm.generate("hello", SamplingParams(max_tokens=4))
    assert answer["text"] == answer.text
    assert answer["token_ids"] == answer["tokens"] == answer.tokens
    with pytest.raises(KeyError):
        answer["words"]
    assert answer.summary().startswith(f"{len(answer.tokens)} tokens, ")


def test_event_loops_follow_one_another(llm: LLM) -> None:
    """Each with concurrent requests, as of a program that calls `asyncio.run` twice."""
    params = SamplingParams(max_tokens=4)
    answers = [
        asyncio.run(llm.agenerate([f"{number}" for number in range(8)], params)) for _ in range(2)
    ]
    assert [answer.tokens for answer in answers[0]] == [answer.tokens for answer in answers[1]]


def test_the_examples_run(llm: LLM) -> None:
    """Every example of the documentation, on the tiny pair instead of the default one."""

    class Loaded:
        def __enter__(self) -> LLM:
            return llm

        def __exit__(self, *_: object) -> None:
            pass

        async def __aenter__(self) -> LLM:
            return llm

        async def __aexit__(self, *_: object) -> None:
            pass

    names = {"LLM": Loaded, "SamplingParams": SamplingParams, "asyncio": asyncio}
    for module in (launch.api.llm, launch.api.sampling_params, ssd_decode):
        result = doctest.testmod(module, extraglobs=names, optionflags=doctest.ELLIPSIS)
        assert result.failed == 0
        assert result.attempted > 0
