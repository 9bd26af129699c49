"""A file of models: typed, validated, and every error names the table."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from launch.serving.models_file import read_models
from launch.settings.settings import StackSettings
from protocol.errors import UsageError
from protocol.messages import SwapDrafter
from tests.properties import examples
from tests.protocol.test_fuzz import damaged


def write(folder: Path, text: str) -> Path:
    path = folder / "models.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_table_is_a_stack(tmp_path: Path) -> None:
    """Settings of the server hold where a table says nothing; HTTP is the server's."""
    path = write(
        tmp_path,
        """
        [small]
        model = "default"
        aliases = ["smollm2"]
        keep_loaded = true

        ["owner/Large Model"]
        model = "owner/large"
        decode_concurrency = 8
        adapter_path = "tuned"

        ["owner/Large Model".drafters]
        lookup = { draft_backend = "ngram" }
        little = { draft_model = "owner/little" }
        """,
    )
    common = StackSettings(http=True, port=9, max_waiting=7, decode_concurrency=2)
    small, large = read_models(path, common)
    assert (small.name, small.aliases, small.keep_loaded) == ("small", ("smollm2",), True)
    assert (small.settings.model, small.settings.decode_concurrency) == ("default", 2)
    assert (small.settings.max_waiting, small.settings.http) == (7, False)
    assert (large.settings.decode_concurrency, large.settings.adapter_path) == (8, "tuned")
    assert large.drafters["lookup"].swap() == SwapDrafter(backend="ngram")
    assert large.drafters["little"].swap() == SwapDrafter(backend="mlx", model="owner/little")
    assert (small.slug, large.slug) == ("small", "Large-Model")


def test_a_folder_offers_what_is_in_it(tmp_path: Path) -> None:
    """Model folders by their names, also one level deeper; others are left out."""
    for name in ("one", "owner/two"):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}", encoding="utf-8")
        (folder / "model.safetensors").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text("{}", encoding="utf-8")
    entries = read_models(tmp_path, StackSettings())
    assert [entry.name for entry in entries] == ["one", "owner/two"]
    assert entries[1].settings.model == str((tmp_path / "owner/two").resolve())


def test_folders_of_stacks_have_short_names_of_their_own(tmp_path: Path) -> None:
    """The path of a socket has a limit, and two stacks cannot share a folder."""
    path = write(
        tmp_path,
        '["a/Qwen3-Coder-30B-A3B-Instruct-4bit"]\n["b/Qwen3-Coder-30B-A3B-8bit"]\n["c/***"]\n',
    )
    slugs = [entry.slug for entry in read_models(path, StackSettings())]
    assert len(set(slugs)) == 3
    assert max(map(len, slugs)) <= 16


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[a]\nmodell = 'x'", r"model 'a': there is no 'modell'"),
        ("[a]\nkv_bytes = 'much'", r"model 'a': kv_bytes must be a whole number"),
        ("[a]\nport = 80", r"model 'a': 'port' is for all models"),
        ("a = 5", r"model 'a': a model is a table"),
        ("[a]\n[b]\naliases = ['a']", "two models are called 'a'"),
        ("[a.drafters]\nx = { draft_backend = 'magic' }", r"model 'a', drafter 'x': unknown"),
        ("[a.drafters]\nx = { model = 'm' }", "there is no 'model'"),
        ("", "names no model"),
        ("[a", "cannot be read"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, text: str, sentence: str) -> None:
    """Before anything starts."""
    with pytest.raises(UsageError, match=sentence):
        read_models(write(tmp_path, text), StackSettings())


def test_what_is_for_one_model_is_not_given_to_all(tmp_path: Path) -> None:
    """`--model` beside `--models` would be one of two answers to one question."""
    path = write(tmp_path, "[a]")
    with pytest.raises(UsageError, match="'draft_model' is for one model"):
        read_models(path, StackSettings(draft_model="x"))


# ---------------------------------------------------------------- anything at all

HONEST = b"""[small]
model = "default"
aliases = ["gpt-4o-mini"]
keep_loaded = true
idle = 3

["owner/coder"]
kv_bytes = 1_000_000
start_timeout_s = 5.5

["owner/coder".drafters]
lookup = { draft_backend = "ngram" }
"""
NAMES = [
    *(field.name for field in msgspec.structs.fields(StackSettings)),
    *("aliases", "drafters", "keep_loaded", "a", "a/b", "", "\n", "default", "a\U0001f600"),
]
VALUES = st.recursive(
    st.booleans() | st.integers() | st.integers(10**20, 10**22) | st.floats() | st.text(max_size=5)
    | st.sampled_from(["ngram", "mlx", "default", "auto", "1979-05-27T07:32:00Z"]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(NAMES), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
TABLES = st.dictionaries(
    st.sampled_from(NAMES),
    st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=4) | VALUES,
    max_size=3,
)


def to_toml(value: Any) -> str:
    """A value as TOML has it; tables are inline."""
    match value:
        case bool():
            return str(value).lower()
        case int() | float():
            return repr(value)
        case str():
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case list():
            return f"[{', '.join(map(to_toml, value))}]"
        case _:
            pairs = (f"{to_toml(key)} = {to_toml(one)}" for key, one in value.items())
            return f"{{ {', '.join(pairs)} }}"


def read_anything(path: Path) -> None:
    """It is understood, so that every process can be told of it, or refused in a sentence."""
    try:
        entries = read_models(path, StackSettings())
    except UsageError as error:
        sentence = str(error)
        assert str(path) in sentence
        assert sentence.isprintable()
        assert len(sentence) < 400
        return
    names = [name for entry in entries for name in (entry.name, *entry.aliases)]
    assert len(names) == len(set(names)) > 0
    assert len({entry.slug for entry in entries}) == len(entries)
    for entry in entries:
        told = msgspec.json.encode(entry.settings)
        assert msgspec.json.decode(told, type=StackSettings) == entry.settings


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("f") / "models.toml"


@examples(200)
@given(content=damaged(HONEST) | st.binary(max_size=60))
@example(content=b"a = " + b"[" * 100_000)
@example(content=b"[a]\nkv_bytes = " + b"9" * 5000)
def test_damaged_files_are_understood_or_refused(file: Path, content: bytes) -> None:
    """Bytes that were changed, and bytes that are no TOML."""
    file.write_bytes(content)
    read_anything(file)


@examples(300)
@given(tables=TABLES)
@example(tables={"a": {"start_timeout_s": float("inf")}})
@example(tables={"a": {"kv_bytes": 10**20}})
def test_any_tables_are_understood_or_refused(file: Path, tables: dict[str, Any]) -> None:
    """Anything in the place of a setting; the sentence names the model whose table is wrong."""
    lines = [f"{to_toml(name)} = {to_toml(table)}" for name, table in tables.items()]
    file.write_text("\n".join(lines), encoding="utf-8", errors="replace")
    read_anything(file)


@pytest.mark.parametrize("text", ['{"a": {"model": "b"}}', "[]", "null", '"a"', "5"])
def test_json_is_no_models_file(tmp_path: Path, text: str) -> None:
    """It is TOML; the sentence is the reader's."""
    with pytest.raises(UsageError, match=r"models\.toml' cannot be read: "):
        read_models(write(tmp_path, text), StackSettings())
