"""The target's tokenizer and chat template, from a model folder made here."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from orchestrator.text.tokenizer import TargetTokenizer
from protocol.errors import ModelError, UsageError
from protocol.messages import ChatMessage

CORPUS = ["the quick brown fox", "the lazy dog and the quick fox", "grüße, 世界 und ñandú"] * 3
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CONFIG = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": TEMPLATE}
HELLO = [ChatMessage(role="user", content="the fox")]

Make = Callable[..., Path]


@pytest.fixture(scope="session")
def description() -> str:
    """A byte-level BPE tokenizer with four special tokens."""
    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<s>", "</s>", "<|user|>", "<|assistant|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    text: str = tokenizer.to_str()
    return text


@pytest.fixture
def make(tmp_path: Path, description: str) -> Make:
    """Writes a model folder: the tokenizer, and the JSON files that are named."""

    def write(**files: Any) -> Path:
        (tmp_path / "tokenizer.json").write_text(description, encoding="utf-8")
        for name, content in files.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
        return tmp_path

    return write


def text_of(tokenizer: TargetTokenizer, tokens: list[int]) -> str:
    stream = tokenizer.stream()
    return "".join(stream.push(token) for token in tokens)


def plain_tokens(folder: Path, text: str) -> list[int]:
    raw: Any = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids: list[int] = raw.encode(text, add_special_tokens=False).ids
    return ids


def test_a_conversation_is_rendered_by_the_template(make: Make) -> None:
    """The prompt is the rendered template, special tokens as single ids, ready for the answer."""
    folder = make(tokenizer_config=CONFIG)
    prompt = TargetTokenizer(folder).encode(HELLO)
    assert plain_tokens(folder, "<s><|user|>the fox</s><|assistant|>") == prompt
    assert prompt[:2] == [0, 2]
    assert prompt[-2:] == [1, 3]


def test_a_template_file_comes_before_the_configuration(make: Make) -> None:
    """`chat_template.jinja` overrides the template in `tokenizer_config.json`."""
    folder = make(tokenizer_config=CONFIG)
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}!", encoding="utf-8")
    assert plain_tokens(folder, "the fox!") == TargetTokenizer(folder).encode(HELLO)


def test_the_default_of_several_templates_is_used(make: Make) -> None:
    """Of a list of named templates, the one named `default` renders conversations."""
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    folder = make(tokenizer_config={"chat_template": named})
    assert plain_tokens(folder, "yes") == TargetTokenizer(folder).encode(HELLO)


def test_without_a_template_the_contents_are_the_prompt(make: Make) -> None:
    """A base model gets the contents, one per line."""
    folder = make()
    messages = [*HELLO, ChatMessage(role="assistant", content="the dog")]
    assert plain_tokens(folder, "the fox\nthe dog") == TargetTokenizer(folder).encode(messages)


def test_templates_have_the_usual_helpers(make: Make) -> None:
    """Loop controls, `tojson` without ASCII escapes, `strftime_now` and trimmed blocks work."""
    template = (
        "{% for m in messages %}\n{% if loop.index > 1 %}{% break %}{% endif %}\n"
        "{{ m.content | tojson }}{{ strftime_now('%Y') | length }}{% endfor %}"
    )
    folder = make(tokenizer_config={"chat_template": template})
    messages = [ChatMessage(role="user", content="ñ"), *HELLO]
    assert plain_tokens(folder, '"ñ"4') == TargetTokenizer(folder).encode(messages)


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[7].content.text }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ messages[0].content + 1 }}",
        "{{ tools | length }}",
        "{{ 1 / 0 }}",
        "{{ range(10 ** 9) | length }}",
    ],
)
def test_a_template_that_fails_refuses_the_conversation(make: Make, template: str) -> None:
    """Whatever goes wrong in a template is the request's error, not the orchestrator's."""
    tokenizer = TargetTokenizer(make(tokenizer_config={"chat_template": template}))
    with pytest.raises(UsageError, match="the chat template refuses these messages"):
        tokenizer.encode(HELLO)


def test_a_templates_own_words_are_kept(make: Make) -> None:
    """The sentence with which a template refuses a conversation reaches the user."""
    template = "{{ raise_exception('roles must alternate') }}"
    tokenizer = TargetTokenizer(make(tokenizer_config={"chat_template": template}))
    with pytest.raises(UsageError, match="roles must alternate"):
        tokenizer.encode(HELLO)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, []),
        ({"config": {"eos_token_id": 1}}, [1]),
        ({"config": {"eos_token_id": [1, 2]}}, [1, 2]),
        ({"config": {"eos_token_id": None}}, []),
        ({"config": {"eos_token_id": 0}}, [0]),
        ({"generation_config": {"eos_token_id": [3]}}, [3]),
        ({"config": {"eos_token_id": 1}, "generation_config": {"eos_token_id": [3, 2]}}, [1, 2, 3]),
        ({"tokenizer_config": {"eos_token": "<|user|>"}}, [2]),
        ({"tokenizer_config": {"eos_token": {"content": "<|assistant|>"}}}, [3]),
        ({"tokenizer_config": {"eos_token": None}}, []),
        ({"tokenizer_config": {"eos_token": "unknown"}}, []),
        ({"config": {"eos_token_id": 0}, "tokenizer_config": CONFIG}, [0, 1]),
    ],
    ids=str,
)
def test_stop_tokens_are_gathered(make: Make, files: dict[str, Any], expected: list[int]) -> None:
    """Every stop token that any file of the folder names ends an answer."""
    assert expected == sorted(TargetTokenizer(make(**files)).stop_ids)


def test_a_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    """The error names the folder and what is missing."""
    with pytest.raises(ModelError, match=r"has no tokenizer\.json"):
        TargetTokenizer(tmp_path)


def test_a_broken_tokenizer_is_refused(tmp_path: Path) -> None:
    """A file that is no tokenizer is a ModelError that names it."""
    (tmp_path / "tokenizer.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ModelError, match="is not a tokenizer description"):
        TargetTokenizer(tmp_path)


@pytest.mark.parametrize("name", ["config", "generation_config", "tokenizer_config"])
@pytest.mark.parametrize(
    ("content", "sentence"), [("{", "is not JSON"), ("[]", "does not hold a JSON object")]
)
def test_broken_configurations_are_refused(
    make: Make, name: str, content: str, sentence: str
) -> None:
    """A configuration that cannot be read is a ModelError that names the file."""
    folder = make()
    (folder / f"{name}.json").write_text(content, encoding="utf-8")
    with pytest.raises(ModelError, match=rf"{name}\.json.*{sentence}"):
        TargetTokenizer(folder)


def test_a_broken_template_is_refused(make: Make) -> None:
    """A template that cannot be parsed is a ModelError when the folder is read."""
    with pytest.raises(ModelError, match=r"the chat template .* is broken"):
        TargetTokenizer(make(tokenizer_config={"chat_template": "{% for %}"}))


@given(st.text("the fox\n\u00e9\u4e16\U0001f600\u0301\u200d", max_size=20))
def test_text_survives(
    tmp_path_factory: pytest.TempPathFactory, description: str, text: str
) -> None:
    """Any text comes back from its tokens, and no piece holds half a character."""
    folder = tmp_path_factory.mktemp("t")
    (folder / "tokenizer.json").write_text(description, encoding="utf-8")
    tokenizer = TargetTokenizer(folder)
    stream = tokenizer.stream()
    pieces = [stream.push(token) for token in plain_tokens(folder, text)]
    assert text == "".join(pieces)
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_character_comes_whole(make: Make) -> None:
    """A character of several tokens appears with its last one, and nothing appears before."""
    folder = make()
    tokens = plain_tokens(folder, "😀")
    assert len(tokens) == 4
    stream = TargetTokenizer(folder).stream()
    assert [stream.push(token) for token in tokens] == ["", "", "", "😀"]


def test_special_tokens_have_no_text(make: Make) -> None:
    """A special token inside an answer does not show."""
    folder = make()
    tokens = [2, *plain_tokens(folder, "the"), 3, *plain_tokens(folder, " fox"), 1]
    assert text_of(TargetTokenizer(folder), tokens) == "the fox"


def test_marks_may_be_shown(make: Make) -> None:
    """Where calls of tools are marked by special tokens, these are text; stop tokens are not."""
    folder = make(tokenizer_config=CONFIG)
    tokens = [2, *plain_tokens(folder, "the"), 3, *plain_tokens(folder, " fox"), 1]
    stream = TargetTokenizer(folder).stream(marks=True)
    assert "".join(stream.push(token) for token in tokens) == "<|user|>the<|assistant|> fox"


def test_streams_are_independent(make: Make) -> None:
    """Two answers that are decoded in turn do not see each other's halves."""
    folder = make()
    tokenizer = TargetTokenizer(folder)
    streams = tokenizer.stream(), tokenizer.stream()
    first, second = plain_tokens(folder, "😀"), plain_tokens(folder, "🦊")
    pieces = [(streams[0].push(a), streams[1].push(b)) for a, b in zip(first, second, strict=True)]
    assert pieces[-1] == ("😀", "🦊")
