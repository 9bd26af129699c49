"""The codec: what goes in comes out, and nothing else comes in."""

import tracemalloc
from types import UnionType
from typing import Any, get_args

import msgpack
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import inspect

from protocol import messages
from protocol.errors import ProtocolError
from protocol.messages import Message
from protocol.transport.codec import MAX_MESSAGE_BYTES, Decoder, encode
from tests.properties import examples

UNIONS: dict[str, Any] = {
    name: union for name, union in vars(messages).items() if isinstance(union, UnionType)
}
MEMBERS = sorted(
    {kind for union in UNIONS.values() for kind in get_args(union)}, key=lambda kind: kind.__name__
)
DECODERS: dict[str, Decoder[Message]] = {name: Decoder(union) for name, union in UNIONS.items()}
TEXTS = st.text("aZ \0\u00e9\u6f22\U0001f600", max_size=6)


def values(kind: Any) -> st.SearchStrategy[Any]:  # noqa: C901, PLR0911, PLR0912  # a line per kind of field
    """Any value that a field of this type may have."""
    match kind:
        case inspect.BoolType():
            return st.booleans()
        case inspect.IntType(ge=ge, lt=lt, le=le):
            top = lt - 1 if lt is not None else le
            low = ge if ge is not None else -(2**63)
            return st.integers(low, top if top is not None else 2**63 - 1)
        case inspect.FloatType(ge=ge, gt=gt, le=le, lt=lt):
            low, high = ge if ge is not None else gt, le if le is not None else lt
            return st.floats(
                low, high, exclude_min=gt is not None, exclude_max=lt is not None, allow_nan=False
            )
        case inspect.StrType():
            return TEXTS
        case inspect.BytesType():
            return st.binary(max_size=8)
        case inspect.LiteralType(values=allowed):
            return st.sampled_from(sorted(allowed))
        case inspect.ListType(item_type=item):
            return st.lists(values(item), max_size=3)
        case inspect.TupleType(item_types=items):
            return st.tuples(*map(values, items))
        case inspect.VarTupleType(item_type=item):
            return st.lists(values(item), max_size=3).map(tuple)
        case inspect.AnyType():
            return TEXTS
        case inspect.UnionType(types=types):
            return st.one_of(*map(values, types))
        case inspect.NoneType():
            return st.none()
        case inspect.DictType(key_type=key, value_type=value):
            return st.dictionaries(values(key), values(value), max_size=3)
        case inspect.StructType(cls=cls, fields=fields):
            return st.builds(cls, **{f.name: values(f.type) for f in fields})
    raise NotImplementedError(kind)


def instances(kind: type[Message]) -> st.SearchStrategy[Message]:
    return values(inspect.type_info(kind))


def home(kind: type[Message]) -> Decoder[Message]:
    """A decoder whose union has this message."""
    return next(DECODERS[name] for name, union in UNIONS.items() if kind in get_args(union))


def example(kind: type[Message]) -> dict[str, Any]:
    """A valid message as the map that travels."""
    fields = inspect.type_info(kind).fields  # type: ignore[attr-defined]  # a StructType has them
    given_ = {f.name: plain(f.type) for f in fields}
    built: dict[str, Any] = msgspec.to_builtins(kind(**given_), builtin_types=(bytes,))
    return built


def plain(kind: Any) -> Any:  # noqa: C901, PLR0911  # one line per kind of field
    """One ordinary value of a field's type."""
    match kind:
        case inspect.BoolType():
            return True
        case inspect.IntType() | inspect.FloatType():
            return 1
        case inspect.StrType():
            return "x"
        case inspect.BytesType():
            return b"x"
        case inspect.LiteralType(values=allowed):
            return sorted(allowed)[0]
        case inspect.ListType(item_type=item):
            return [plain(item)]
        case inspect.TupleType(item_types=items):
            return tuple(map(plain, items))
        case inspect.VarTupleType(item_type=item):
            return (plain(item),)
        case inspect.AnyType():
            return "x"
        case inspect.UnionType(types=types):
            return plain(types[0])
        case inspect.DictType(key_type=key, value_type=value):
            return {plain(key): plain(value)}
        case inspect.StructType(cls=cls, fields=fields):
            bounded = {"top_p": 0.5, "min_p": 0.5}  # 1 is outside
            return cls(**{f.name: bounded.get(f.name, plain(f.type)) for f in fields})
    raise NotImplementedError(kind)


def pack(value: Any) -> bytes:
    packed: bytes = msgpack.packb(value, use_bin_type=True)
    return packed


def test_every_message_belongs_to_a_direction() -> None:
    """No class of `messages.py` is outside the unions, and no two share a tag."""
    assert {"ToDrafter", "FromDrafter", "ToOrchestrator", "FromSupervisor"} < set(UNIONS)
    here = [kind for kind in Message.__subclasses__() if kind.__module__ == Message.__module__]
    assert set(here) == set(MEMBERS)
    tags = [inspect.type_info(kind).tag for kind in MEMBERS]  # type: ignore[attr-defined]
    assert len(MEMBERS) == len(set(tags))


@pytest.mark.parametrize("kind", MEMBERS, ids=lambda kind: kind.__name__)
def test_messages_round_trip(kind: type[Message]) -> None:
    """Every message comes back equal through every union that has it."""

    @examples(15)
    @given(instances(kind))
    def check(message: Message) -> None:
        data = encode(message)
        for name, union in UNIONS.items():
            if kind in get_args(union):
                assert message == DECODERS[name].decode(data)

    check()


@pytest.mark.parametrize("kind", MEMBERS, ids=lambda kind: kind.__name__)
def test_examples_are_valid(kind: type[Message]) -> None:
    """The maps that the tests below spoil are valid before."""
    assert isinstance(home(kind).decode(pack(example(kind))), kind)


@pytest.mark.parametrize("kind", MEMBERS, ids=lambda kind: kind.__name__)
def test_unknown_fields_are_refused(kind: type[Message]) -> None:
    """A field that the message does not have is a ProtocolError that names it."""
    with pytest.raises(ProtocolError, match="surprise"):
        home(kind).decode(pack({**example(kind), "surprise": 1}))


FREE = inspect.type_info(dict[str, Any])
FIELDS = [
    (kind, field)
    for kind in MEMBERS
    for field in inspect.type_info(kind).fields  # type: ignore[attr-defined]
]


@pytest.mark.parametrize(
    ("kind", "field"), FIELDS, ids=[f"{kind.__name__}.{field.name}" for kind, field in FIELDS]
)
def test_wrong_and_missing_fields_are_refused(kind: type[Message], field: inspect.Field) -> None:
    """A field of a wrong type, or a missing one without a default, is a ProtocolError."""
    good = example(kind)
    for wrong in (None, b"bytes", {"a": 1}, [["nested"]], -1.5):
        if isinstance(field.type, inspect.FloatType) and wrong == -1.5:
            continue
        if field.type == FREE and wrong == {"a": 1}:
            continue
        if isinstance(field.type, inspect.BytesType) and wrong == b"bytes":
            continue
        if wrong is None and inspect.NoneType() in getattr(field.type, "types", ()):
            continue
        with pytest.raises(ProtocolError, match=field.name):
            home(kind).decode(pack({**good, field.name: wrong}))
    good.pop(field.name, None)  # some messages leave defaults out
    if field.required:
        with pytest.raises(ProtocolError, match=field.name):
            home(kind).decode(pack(good))
    else:
        assert isinstance(home(kind).decode(pack(good)), kind)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        (messages.Verify, {"nodes": [-1]}),
        (messages.Verify, {"nodes": [2**31]}),
        (messages.VerificationOutcome, {"bonus": -1}),
        (messages.DraftTree, {"outcomes": [(0, -1)]}),
        (messages.DraftTree, {"tokens": [messages.END_OF_BRANCH - 1]}),
        (messages.DraftTree, {"tokens": [2**31]}),
        (messages.DraftTree, {"confidences": [float("nan")]}),
        (messages.DraftTree, {"confidences": [float("inf")]}),
        (messages.DraftTree, {"confidences": [-0.1]}),
        (messages.DraftTree, {"outcomes": [(0,)]}),
        (messages.DraftTree, {"outcomes": [(0, 1, 2)]}),
        (messages.Generate, {"max_tokens": 0}),
        (messages.Generate, {"num_draft_tokens": 65}),
        (messages.Generate, {"branches": 257}),
        (messages.Generate, {"mode": "psychic"}),
        (messages.Generate, {"messages": [{"role": "user", "content": "x", "mood": "y"}]}),
        (messages.Generate, {"sampling": {"temperature": -0.1}}),
        (messages.Generate, {"sampling": {"temperature": float("nan")}}),
        (messages.Generate, {"sampling": {"temperature": float("inf")}}),
        (messages.Generate, {"sampling": {"top_p": 0.0}}),
        (messages.Prepare, {"base": -1}),
        (messages.Prepare, {"fan_out": [-1]}),
        (messages.Prepare, {"depth": -1}),
        (messages.DraftNow, {"accepted": -1}),
        (messages.DraftNow, {"count": -1}),
        (messages.Generate, {"sampling": {"logits_options": {"repetition_penalty": 1e-40}}}),
        (messages.Generate, {"sampling": {"logits_options": {"logit_bias": [[1, 1e30]]}}}),
        (messages.Generate, {"sampling": {"logits_options": {"grammar": "x" * 200_000}}}),
        (messages.Failed, {"error": "x" * 5000}),
        (messages.Generate, {"sampling": {"top_p": float("nan")}}),
        (messages.Generate, {"sampling": {"min_p": 1.0}}),
        (messages.Generate, {"sampling": {"min_p": float("nan")}}),
        (messages.Generate, {"sampling": {"top_k": -1}}),
        (messages.Generate, {"sampling": {"seed": 2**63}}),
        (messages.Generate, {"sampling": {"seed": -1}}),
        (messages.Generate, {"sampling": {"tempreature": 1.0}}),
        (messages.Generate, {"sampling": {"acceptance": "lenient"}}),
        (messages.Generate, {"sampling": {"draft_temperature": -0.1}}),
        (messages.Generate, {"sampling": {"draft_top_p": 0.0}}),
        (messages.Generate, {"sampling": {"saguaro": 1.1}}),
        (messages.Generate, {"sampling": {"saguaro": float("nan")}}),
        (messages.Verify, {"distributions": [{"tokens": [1], "probabilities": [float("nan")]}]}),
        (messages.Verify, {"distributions": [{"tokens": [-1], "probabilities": [1.0]}]}),
        (messages.DraftTree, {"distributions": [{"tokens": [1], "probabilities": [-0.1]}]}),
        (messages.DraftTree, {"distributions": [{"tokens": [1], "probabilities": [float("inf")]}]}),
        (messages.DraftTree, {"distributions": [{"tokens": [2**31], "probabilities": [1.0]}]}),
        (messages.Hello, {"role": "spectator"}),
        (messages.Finished, {"reason": "boredom"}),
    ],
    ids=str,
)
def test_values_out_of_range_are_refused(kind: type[Message], changes: dict[str, Any]) -> None:
    """A value outside its range or its choices is a ProtocolError that names the field."""
    with pytest.raises(ProtocolError, match=next(iter(changes))):
        home(kind).decode(pack({**example(kind), **changes}))


@pytest.mark.parametrize(
    "value",
    [
        {"type": "nonsense"},
        {"type": ["stop"]},
        {"type": None},
        {"type": b"stop"},
        {b"type": "stop"},
        {},
        [],
        ["stop"],
        "stop",
        b"stop",
        7,
        2**64 - 1,
        1.5,
        None,
        True,
        msgpack.Timestamp(1, 2),
        msgpack.ExtType(5, b"x"),
        {"type": "stop", "when": msgpack.ExtType(5, b"x")},
    ],
    ids=str,
)
def test_other_values_are_refused(value: Any) -> None:
    """What is not a map with a known tag is a ProtocolError that lists the known ones."""
    for decoder in DECODERS.values():
        with pytest.raises(ProtocolError, match="known: "):
            decoder.decode(pack(value))


def test_other_directions_are_refused() -> None:
    """A message is valid only in the directions that have it, and the error says which are."""
    with pytest.raises(
        ProtocolError, match=r"valid here .*'verify'.*known: close, draft, features, heartbeat"
    ):
        DECODERS["ToDrafter"].decode(pack(example(messages.Verify)))


GOOD = pack(example(messages.DraftTree))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        GOOD[:-1],
        GOOD + b"\x00",
        GOOD + GOOD,
        b"\x91" * 100_000,
        b"\x81\xa1a" * 100_000,
        b"\xdd\xff\xff\xff\xff",
        GOOD[:1] + b"\xa6tokens\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\x81\xa1\xff\x01",
        b"\x81\x01\x01",
        b"\x81\x90\x01",
        b"\xc7\x0c\xff" + b"\xff" * 12,
    ],
    ids=lambda data: data[:8].hex() or "empty",
)
def test_what_is_not_msgpack_is_refused(data: bytes) -> None:
    """Truncated, trailing, too deep, too long and unreadable bytes are ProtocolErrors."""
    with pytest.raises(ProtocolError, match="no message"):
        DECODERS["FromService"].decode(data)


def test_oversize_messages_are_refused() -> None:
    """A message larger than the limit is refused before it is parsed."""
    with pytest.raises(ProtocolError, match="exceeds the limit"):
        DECODERS["FromService"].decode(bytes(MAX_MESSAGE_BYTES + 1))


def test_nesting_is_bounded_before_the_types_are_looked_at() -> None:
    """A moderately deep value is still only a ProtocolError."""
    with pytest.raises(ProtocolError):
        DECODERS["FromService"].decode(b"\x91" * 500 + b"\xc0")


def survives(data: bytes) -> None:
    """Whatever the bytes, a decoder gives a message or a ProtocolError."""
    for decoder in DECODERS.values():
        try:
            message = decoder.decode(data)
        except ProtocolError:
            continue
        assert isinstance(message, Message)


@examples(100)
@given(st.binary(max_size=60))
def test_any_bytes_are_survived(data: bytes) -> None:
    """Arbitrary bytes are a message or a ProtocolError, never another exception."""
    survives(data)


BUILTINS = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | TEXTS
    | st.binary(max_size=5)
    | st.builds(msgpack.ExtType, st.integers(0, 127), st.binary(max_size=5)),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(TEXTS | st.binary(max_size=3), inner, max_size=4)
    ),
    max_leaves=8,
)


@examples(100)
@given(BUILTINS)
def test_any_value_is_survived(value: Any) -> None:
    """Arbitrary msgpack values are a message or a ProtocolError."""
    survives(pack(value))


@examples(120)
@given(st.sampled_from(MEMBERS), st.data())
def test_spoiled_messages_are_survived(kind: type[Message], data: st.DataObject) -> None:
    """A valid message with one field replaced by anything is a message or a ProtocolError."""
    spoiled = example(kind)
    spoiled[data.draw(st.sampled_from(sorted(spoiled)))] = data.draw(BUILTINS)
    survives(pack(spoiled))


@examples(100)
@given(st.sampled_from(MEMBERS), st.integers(0, 400), st.binary(max_size=4), st.integers(0, 4))
def test_damaged_messages_are_survived(
    kind: type[Message], at: int, inserted: bytes, removed: int
) -> None:
    """A valid message with some bytes replaced is a message or a ProtocolError."""
    data = pack(example(kind))
    at %= len(data)
    survives(data[:at] + inserted + data[at + removed :])


def test_lengths_are_checked_before_room_is_made() -> None:
    """Lists that claim or have more elements than the field allows cost neither time nor memory."""
    head = pack({"type": "verify", "sequence": 1, "round": 1, "position": 0, "nodes": 0})[:-1]
    for length, body in ((2**32 - 1, b""), (messages.MAX_TOKENS + 1, b"\x01" * 8_000_000)):
        data = head + b"\xdd" + length.to_bytes(4, "big") + body
        tracemalloc.start()
        with pytest.raises(ProtocolError, match="length <="):
            DECODERS["ToVerifier"].decode(data)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 1_000_000
