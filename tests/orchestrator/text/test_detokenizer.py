"""From tokens to text: whole characters, whatever the tokens."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from orchestrator.text.detokenizer import Detokenizer, TextStream
from orchestrator.text.stop_strings import StoppableText
from protocol.messages import TokenLogprobs
from tests.properties import examples

_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
_WORDS = ["\u2581the", "\u2581fox", "x", "\u2581", "\u2581\u2581", "\u4e16", "##y", "end</w>", "z"]
_KINDS: dict[str, Any] = {
    "byte level": decoders.ByteLevel(),
    "sentencepiece": decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    ),
    "metaspace": decoders.Metaspace(),
    "wordpiece": decoders.WordPiece(),
    "suffixes": decoders.BPEDecoder("</w>"),
    "nothing": None,
}


def tokenizer_of(kind: str) -> Any:
    """All bytes, a few words, a special token and an added one that is not special."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet()) if kind == "byte level" else _BYTES
    entries = {entry: i for i, entry in enumerate([*alphabet, *_WORDS])}
    tokenizer: Any = Tokenizer(models.WordLevel(entries, unk_token="x"))  # noqa: S106  # no secret
    if _KINDS[kind] is not None:
        tokenizer.decoder = _KINDS[kind]
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    tokenizer.add_tokens([AddedToken("<tool call>", special=False)])
    return tokenizer


def stream_of(kind: str, *, shows_special: bool = False) -> TextStream:
    detokenizer = Detokenizer(tokenizer_of(kind))
    return detokenizer.stream(shows_special=shows_special, hidden=frozenset())


def text_of(stream: TextStream, tokens: list[int]) -> str:
    return "".join(stream.push(token) for token in tokens)


TOKENS = st.lists(st.integers(0, 300), max_size=60)


@pytest.mark.parametrize("kind", list(_KINDS))
@examples(200)
@given(tokens=TOKENS)
def test_any_tokens_are_decoded(kind: str, tokens: list[int]) -> None:
    """Parts of characters, bytes that are none, and numbers of no token: nothing raises."""
    text_of(stream_of(kind), tokens)


@pytest.mark.parametrize("kind", ["byte level", "sentencepiece", "metaspace"])
@examples(200)
@given(tokens=TOKENS)
def test_valid_text_is_the_librarys(kind: str, tokens: list[int]) -> None:
    """Where the library finds whole characters only, the stream has the same text."""
    tokenizer = tokenizer_of(kind)
    expected = tokenizer.decode(tokens)
    if "\ufffd" not in expected:
        assert text_of(stream_of(kind), tokens) == expected


@given(st.text(max_size=20), st.lists(st.integers(128, 255), max_size=4))
def test_bytes_that_are_no_character_show(text: str, wrong: list[int]) -> None:
    """They become U+FFFD, and the text behind them is whole."""
    detokenizer = Detokenizer(tokenizer_of("byte level"))
    by_byte = {detokenizer.bytes_of(token): token for token in range(256)}
    data = [*bytes(wrong), *b" ", *text.encode()]
    stream = detokenizer.stream(shows_special=False, hidden=frozenset())
    got = text_of(stream, [by_byte[bytes([byte])] for byte in data])
    assert got == bytes(data).decode(errors="replace")


def test_the_exception_of_the_librarys_stream_is_gone() -> None:
    """Tokens on which `DecodeStream` raises "Invalid prefix encountered" have their text."""
    tokenizer = tokenizer_of("sentencepiece")
    entry = tokenizer.token_to_id
    tokens = [entry("<0xE4>"), entry("<0xB8>"), entry("x"), entry("<0xE4>"), entry("<0xB8>"),
              entry("<0x96>"), entry("x")]  # fmt: skip
    assert text_of(stream_of("sentencepiece"), tokens) == "\ufffdx\u4e16x"


def test_special_tokens_show_if_asked() -> None:
    """A special token is text only if asked for; an added one always is."""
    tokens = [tokenizer_of("byte level").token_to_id(t) for t in ("<|end|>", "<tool call>")]
    assert text_of(stream_of("byte level"), tokens) == "<tool call>"
    assert text_of(stream_of("byte level", shows_special=True), tokens) == "<|end|><tool call>"


def test_only_the_first_space_is_removed() -> None:
    """SentencePiece marks the beginning of a word: the answer does not begin with a space."""
    entry = tokenizer_of("sentencepiece").token_to_id
    tokens = [entry("\u2581the"), entry("\u2581fox"), entry("\u2581")]
    assert text_of(stream_of("sentencepiece"), tokens) == "the fox "


def entries_of(stream: TextStream, tokens: list[int], stop: list[str]) -> tuple[str, Any]:
    """The whole text of an answer, and its entries of log-probabilities."""
    text = StoppableText(stream, stop)
    shown, entries = "", []
    for token in tokens:
        pushed = text.push(token, TokenLogprobs(chosen=-1.0, best=[(token, -1.0), (5, -2.0)]))
        shown += pushed.text
        entries += text.take_logprobs()
        if pushed.stopped:
            return shown, entries
    shown += text.flush()
    return shown, entries + text.take_logprobs()


@pytest.mark.parametrize("kind", list(_KINDS))
@examples(50)
@given(
    tokens=st.lists(st.sampled_from([*range(0, 270, 3), *range(255, 272)]), max_size=30),
    stop=st.sampled_from([[], ["the"], ["\u4e16"], ["x", "fo"]]),
)
def test_log_probabilities_are_of_the_text(kind: str, tokens: list[int], stop: list[str]) -> None:
    """Texts and bytes of all tokens, one after the other, are the answer's, however it ends."""
    text, entries = entries_of(stream_of(kind), tokens, stop)
    data = bytes(byte for entry in entries for byte in entry.chosen.data)
    assert data.decode(errors="replace") == text
    assert text.startswith("".join(entry.chosen.text for entry in entries))
    assert all(entry.best[0].text for entry in entries if entry.chosen.text)


def test_an_answer_that_ends_within_a_character_keeps_its_bytes() -> None:
    """They are one U+FFFD at the end, and those of log-probabilities are the bytes themselves."""
    detokenizer = Detokenizer(tokenizer_of("byte level"))
    by_byte = {detokenizer.bytes_of(token): token for token in range(256)}
    tokens = [by_byte[bytes([byte])] for byte in "a世".encode()[:-1]]
    text, entries = entries_of(stream_of("byte level"), tokens, [])
    assert text == "a\ufffd"
    assert [entry.chosen.data for entry in entries] == [[0x61], [0xE4], [0xB8]]
    for kind in ("metaspace", "nothing"):
        stream = stream_of(kind)
        assert text_of(stream, [tokenizer_of(kind).token_to_id("x")]) + stream.end() == "x"
