"""Inputs that are almost right: each is understood or refused by one of our own errors."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.decoding.vocabulary import read_vocabulary
from protocol.errors import ModelError, ProtocolError, UsageError
from protocol.gateway import GatewayModel, GatewaySettings
from protocol.settings import VerifierSettings, decode_settings
from protocol.transport.codec import encode
from services.gateway.dialects.base import Reader
from services.gateway.dialects.chat_reply import read_chat
from services.gateway.dialects.completions import read_completion
from services.gateway.dialects.conversations import Conversations
from services.gateway.dialects.messages_reply import read_messages
from services.gateway.dialects.responses_reply import read_responses
from services.gateway.errors import ApiError
from services.gateway.task import TaskPlanner
from services.gateway.template import ModelText
from services.mlx.loader import load
from tests.properties import examples
from tests.protocol.transport.test_codec import DECODERS, MEMBERS, example, pack
from tests.support.reference import tiny_folder


@st.composite
def damaged(draw: st.DrawFn, data: bytes) -> bytes:
    """Some bytes changed, inserted, deleted or repeated."""
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        until = min(len(data), at + draw(st.integers(0, 8)))
        middle = draw(st.one_of(st.binary(max_size=8), st.just(data[at:until] * 2)))
        data = data[:at] + middle + data[until:]
    return data


@pytest.mark.parametrize("name", DECODERS)
@examples(60)
@given(st.data())
def test_damaged_messages(name: str, data: st.DataObject) -> None:
    """A message that was damaged on the way is another valid one, or a ProtocolError."""
    kind = data.draw(st.sampled_from(MEMBERS))
    decoder = DECODERS[name]
    try:
        message = decoder.decode(data.draw(damaged(pack(example(kind)))))
    except ProtocolError:
        return
    assert encode(message)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(tiny_folder("llama"), tmp_path_factory.mktemp("f") / "m"))


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_damaged_model_folders(folder: Path, name: str) -> None:
    """A model folder with a damaged file is loaded or refused; nothing else comes out of it."""
    whole = (tiny_folder("llama") / name).read_bytes()
    # The header is where damage is understood; weights are weights whatever their bytes.
    head, rest = whole[:3000], whole[3000:]

    @examples(25)
    @given(damaged(head))
    def check(start: bytes) -> None:
        (folder / name).write_bytes(start + rest)
        try:
            read_vocabulary(folder) if name == "tokenizer.json" else load(folder)
        except ModelError:
            return

    try:
        check()
    finally:
        (folder / name).write_bytes(whole)


@given(
    st.one_of(
        st.text(),
        st.recursive(
            st.none() | st.integers() | st.text(),
            lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
            max_leaves=8,
        ).map(str),
    )
)
def test_settings_of_children(argument: str) -> None:
    """Whatever the one argument of a child is, it is settings or a UsageError."""
    try:
        decode_settings(argument, VerifierSettings)
    except UsageError:
        return


BODIES = (
    b'{"model": "default", "messages": [{"role": "user", "content": "hi"}], "temperature": 0.5,'
    b' "stop": ["a"], "max_tokens": 5, "stream": true, "top_k": 3, "seed": 1}',
    b'{"model": "default", "messages": [{"role": "user", "content": [{"type": "text",'
    b' "text": "hi"}]}], "n": 1, "logit_bias": {"5": 1.5}, "top_logprobs": 2}',
    b'{"model": "default", "prompt": [1, 2, 3], "max_tokens": 5}',
    b'{"model": "default", "prompt": "once", "min_p": 0.1, "stop": "b"}',
    b'{"model": "m", "max_tokens": 5, "system": [{"type": "text", "text": "s"}], "messages":'
    b' [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content":'
    b' [{"type": "text", "text": "x"}]}]}, {"role": "assistant", "content": [{"type": "thinking",'
    b' "thinking": "t", "signature": ""}, {"type": "tool_use", "id": "a", "name": "f", "input":'
    b' {}}]}], "tools": [{"name": "f", "input_schema": {"type": "object"}}], "tool_choice":'
    b' {"type": "any"}, "thinking": {"type": "enabled", "budget_tokens": 5}}',
    b'{"model": "m", "instructions": "i", "input": [{"role": "user", "content": [{"type":'
    b' "input_text", "text": "x"}]}, {"type": "reasoning", "summary": [], "content": [{"type":'
    b' "reasoning_text", "text": "t"}]}, {"type": "function_call", "call_id": "c", "name": "f",'
    b' "arguments": "{}"}, {"type": "function_call_output", "call_id": "c", "output": "o"}],'
    b' "tools": [{"type": "function", "name": "f", "parameters": {}}, {"type": "custom", "name":'
    b' "g"}], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type":'
    b' "function", "name": "f"}]}, "text": {"format": {"type": "json_schema", "schema": {}}}}',
)


PLANNER = TaskPlanner(ModelText())
GATEWAY = GatewaySettings(
    lifeline=0, listener=0, models=[GatewayModel(names=["m"], clients_address="")]
)
READERS: tuple[Reader, ...] = (
    read_chat,
    read_completion,
    read_messages,
    lambda body, settings: read_responses(body, settings, Conversations()),
)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=6)
    | st.sampled_from(["text", "function", "tool_use", "user", "assistant", "message", "auto"]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(["type", "name", "content", "a"]), inner, max_size=3),
    max_leaves=5,
)  # fmt: skip


@st.composite
def replaced(draw: st.DrawFn, value: Any) -> Any:
    """The same JSON with something else at one place."""
    if not value or not isinstance(value, dict | list) or draw(st.integers(0, 3)) == 0:
        return draw(JSON)
    if isinstance(value, dict):
        key = draw(st.sampled_from(sorted(value)))
        return {**value, key: draw(replaced(value[key]))}
    at = draw(st.integers(0, len(value) - 1))
    return [*value[:at], draw(replaced(value[at])), *value[at + 1 :]]


def _ask(body: bytes) -> None:
    """Read it as each API would; all but our own errors come out."""
    for read in READERS:
        try:
            task = read(body, GATEWAY).task
            for choice in PLANNER.plan(task):
                DECODERS["ToOrchestrator"].decode(encode(choice.request))
        except ApiError as fault:
            assert 400 <= fault.status < 500  # noqa: PT017  # most are refused, some are valid
        except (UsageError, ProtocolError):
            continue


@examples(300)
@given(st.sampled_from(BODIES).flatmap(damaged))
def test_damaged_http_bodies(body: bytes) -> None:
    """A damaged HTTP body is refused with a status and a sentence, or it can be asked."""
    _ask(body)


@examples(400)
@given(st.sampled_from(BODIES).map(json.loads).flatmap(replaced))
def test_http_bodies_of_the_wrong_shape(body: Any) -> None:
    """So is JSON that has something else where a field should be."""
    _ask(json.dumps(body).encode())
