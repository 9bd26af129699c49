"""`python -m tests.tools.fuzz TARGET [libFuzzer options]`: coverage-guided fuzzing with atheris.

Targets: codec, stream (both stdio protocols), http, asked (JSON of our fields), gguf,
safetensors, tokenizer. An input
that leads to anything but our own errors is a crash; atheris writes it to a file, and it
becomes a test. Example: `python -m tests.tools.fuzz codec -max_total_time=120`.
"""

import contextlib
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

import atheris

# Atheris has no types, and makes this name when it is imported.
with atheris.instrument_imports(  # pyright: ignore[reportAttributeAccessIssue]
    include=["protocol", "services", "msgpack"]
):
    from protocol import messages
    from protocol.decoding.vocabulary import read_vocabulary
    from protocol.errors import ModelError, ProtocolError, UsageError
    from protocol.transport.codec import Decoder, encode
    from protocol.transport.framing import FrameReader
    from services.drafter.server import line_protocol
    from services.gateway.dialects.chat import ChatRequest
    from services.gateway.dialects.completions import CompletionRequest
    from services.gateway.dialects.messages import MessagesRequest
    from services.gateway.dialects.responses import ResponsesRequest
    from services.gateway.errors import ApiError
    from services.gguf import convert as gguf
    from services.mlx import loader

from tests.protocol.test_fuzz import BODIES, GATEWAY, PLANNER, READERS
from tests.support.gguf_file import write_gguf
from tests.support.reference import tiny_folder

_WORDS = [
    *("type", "text", "function", "name", "arguments", "id", "role", "content", "system", "user"),
    *("assistant", "tool", "tool_calls", "tool_call_id", "parameters", "strict", "json_schema"),
    *("json_object", "schema", "properties", "required", "items", "enum", "const", "anyOf", "$ref"),
    *("object", "array", "string", "integer", "number", "boolean", "null", "additionalProperties"),
    *("none", "auto", "include_usage", "include_origins", "5", "#/$defs/a", "$defs", "pattern"),
    *("minItems", "maxItems", "format", "description", "a", ""),
]
Part_co = TypeVar("Part_co", covariant=True)
FOLDER = Path(tempfile.mkdtemp(prefix="ssd-fuzz-"))
DECODERS = [
    Decoder(getattr(messages, name))
    for name in ("FromService", "ToVerifier", "ToDrafter", "ToOrchestrator", "FromOrchestrator")
]


def codec(data: bytes) -> None:
    """What is decoded can be encoded again and comes back equal."""
    for decoder in DECODERS:
        try:
            message = decoder.decode(data)
        except ProtocolError:
            continue
        if message == message:  # noqa: PLR0124  # NaN is no message, see below
            assert decoder.decode(encode(message)) == message


class Cutter(Protocol[Part_co]):
    """Cuts a program's output into parts."""

    def feed(self, data: bytes, /) -> None: ...
    def cut(self) -> Part_co | None: ...


def stream(data: bytes) -> None:
    """A program's output, in two pieces: messages, lines, or a ProtocolError."""
    decoder: Decoder[messages.FromDrafter] = Decoder(messages.FromDrafter)
    _read(FrameReader(), decoder.decode, data)
    _read(line_protocol.Lines(), line_protocol.read_tokens, data)


def _read(cutter: Cutter[Part_co], read: Callable[[Part_co], object], data: bytes) -> None:
    half = len(data) // 2
    # To refuse is one of the two right answers.
    with contextlib.suppress(ProtocolError):
        for piece in (data[:half], data[half:]):
            cutter.feed(piece)
            while (part := cutter.cut()) is not None:
                read(part)


def http(data: bytes) -> None:
    """A body is refused with a fault that names the field, or it can be asked."""
    for read in READERS:
        with contextlib.suppress(ApiError, UsageError, ProtocolError):
            for choice in PLANNER.plan(read(data, GATEWAY).task):
                encode(choice.request)


def asked(data: bytes) -> None:
    """The same with bodies that are JSON, and mostly of our fields: what is behind the decoder."""
    source = atheris.FuzzedDataProvider(data)  # pyright: ignore[reportAttributeAccessIssue]
    kind = source.PickValueInList(
        [ChatRequest, CompletionRequest, MessagesRequest, ResponsesRequest]
    )
    names = [*kind.__struct_fields__, "nonsense"]
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": "a"}],
        "prompt": "a",
        "input": "a",
        "max_tokens": 5,
    }
    body = {name: value for name, value in body.items() if name in names}
    for _ in range(source.ConsumeIntInRange(0, 6)):
        name, value = source.PickValueInList(names), _value(source, 4)
        fits = name in _SHAPED and source.ConsumeBool()
        body[name] = _SHAPED[name](value) if fits else value
    http(json.dumps(body).encode())


def _value(source: Any, depth: int) -> Any:
    """Something that may stand in JSON, often one of the words that mean something."""
    kind = source.ConsumeIntInRange(0, 7 if depth else 4)
    if kind >= 6:
        pairs = range(source.ConsumeIntInRange(0, 4))
        return {source.PickValueInList(_WORDS): _value(source, depth - 1) for _ in pairs}
    if kind == 5:
        return [_value(source, depth - 1) for _ in range(source.ConsumeIntInRange(0, 3))]
    plain: list[Callable[[], Any]] = [
        lambda: source.PickValueInList([None, True, False, 0, 1, -1, 2**63, 1e300, 0.5]),
        lambda: source.ConsumeInt(4),
        lambda: source.ConsumeUnicodeNoSurrogates(6),
        lambda: source.PickValueInList(_WORDS),
        lambda: source.PickValueInList(_WORDS),
    ]
    return plain[kind]()


_SHAPED: dict[str, Callable[[Any], Any]] = {
    "messages": lambda value: [{"role": "user", "content": value}],
    "tools": lambda value: [{"type": "function", "function": {"name": "a", "parameters": value}}],
    "response_format": lambda value: {
        "type": "json_schema", "json_schema": {"name": "a", "schema": value},
    },
    "logit_bias": lambda value: {"5": value},
    "chat_template_kwargs": lambda value: {"a": value},
    "stop": lambda value: [value],
}  # fmt: skip


def gguf_file(data: bytes) -> None:
    """A GGUF file that is broken is a ModelError."""
    path = FOLDER / "m.gguf"
    path.write_bytes(data)
    try:
        gguf.convert(path, FOLDER / "converted")
    except ModelError:
        return


def safetensors(data: bytes) -> None:
    """Weights that are broken are a ModelError."""
    _copy(FOLDER / "model", "model.safetensors", data)
    try:
        loader.load(FOLDER / "model")
    except ModelError:
        return


def tokenizer(data: bytes) -> None:
    """A tokenizer that is broken is a ModelError."""
    _copy(FOLDER / "vocabulary", "tokenizer.json", data)
    try:
        read_vocabulary(FOLDER / "vocabulary")
    except ModelError:
        return


def _copy(folder: Path, name: str, data: bytes) -> None:
    folder.mkdir(exist_ok=True)
    for file in tiny_folder("llama").iterdir():
        if file.name != name and not (folder / file.name).exists():
            (folder / file.name).write_bytes(file.read_bytes())
    (folder / name).write_bytes(data)


def seeds(target: str) -> list[bytes]:
    """Honest inputs to begin with."""
    source = tiny_folder("llama")
    if target == "gguf":
        path = FOLDER / "seed.gguf"
        write_gguf(path, source)
        return [path.read_bytes()]
    if target == "safetensors":
        return [(source / "model.safetensors").read_bytes()]
    if target == "tokenizer":
        return [(source / "tokenizer.json").read_bytes()]
    if target in {"http", "asked"}:
        return list(BODIES)
    if target == "stream":
        return [b"READY\nTOKENS 1,2,3 4.5ms\nOK\n", encode(messages.Heartbeat(3)) * 2]
    return [
        encode(messages.Heartbeat(3)),
        encode(messages.Generate(request=1, tokens=[1, 2, 3])),
        encode(messages.Verify(sequence=1, round=2, position=3, nodes=[4, 5])),
        encode(
            messages.DraftTree(
                sequence=1, round=1, depth=1, outcomes=[(0, 1)], tokens=[2], confidences=[0.5],
                draft_ms=1.0,
            )
        ),
    ]  # fmt: skip


TARGETS: dict[str, Callable[[bytes], None]] = {
    "codec": codec,
    "stream": stream,
    "http": http,
    "asked": asked,
    "gguf": gguf_file,
    "safetensors": safetensors,
    "tokenizer": tokenizer,
}


def main() -> None:
    """Run one target until libFuzzer's options end it."""
    target = sys.argv.pop(1)
    corpus = FOLDER / "corpus"
    corpus.mkdir()
    for number, seed in enumerate(seeds(target)):
        (corpus / str(number)).write_bytes(seed)
    atheris.Setup([*sys.argv, str(corpus)], TARGETS[target])
    atheris.Fuzz()


if __name__ == "__main__":
    main()
