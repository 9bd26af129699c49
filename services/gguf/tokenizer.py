"""The tokenizer of a GGUF file as `tokenizer.json`: byte-level BPE, and SentencePiece's BPE.

Texts get the ids that llama.cpp gives them. So no normalisation is added that the file does not
name, even where the model's makers had one (Qwen's NFC).
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from gguf import TokenType
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from protocol.errors import ModelError
from services.gguf.file import GGUFFile

_PADDING = re.compile(r"\[PAD\d+\]")
"""Rows of the embedding that no text has; converters call them so."""

_MARK = re.compile(r"<\|(?!endoftext).*\|>")
"""Tokens behind which Phi-3 ignores spaces."""

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_QWEN2 = rf"{_ENDINGS}|{_LETTERS}|\p{{N}}|{_SIGNS}|{_REST}"
_LLAMA3 = rf"{_ENDINGS}|{_LETTERS}|\p{{N}}{{1,3}}|{_SIGNS}|{_REST}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_SLASHED = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_TEKKEN = rf"{_BEFORE}{_UPPER}*{_LOWER}+|{_BEFORE}{_UPPER}+{_LOWER}*|\p{{N}}|{_SLASHED}|{_REST}"
_GPT4O = (
    rf"{_BEFORE}{_UPPER}*{_LOWER}+{_ENDINGS}?|{_BEFORE}{_UPPER}+{_LOWER}*{_ENDINGS}?"
    rf"|\p{{N}}{{1,3}}|{_SLASHED}|{_REST}"
)


class _Split(NamedTuple):
    """How texts are split before BPE."""

    patterns: tuple[str, ...]
    """Each splits what the one before has left: its matches and what is between them."""
    whole_words: bool = False
    """Whether a word that is a token is taken without merging."""
    begins: bool = False
    """Whether a text begins with the BOS token if the file does not say."""


_DIGITS_APART = _Split((r"\p{N}", _GPT2))
_LIKE_LLAMA3 = _Split((_LLAMA3,), whole_words=True, begins=True)
_SPLITS = {
    "default": _Split((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2": _Split((_GPT2,)),
    "smollm": _DIGITS_APART,
    "starcoder": _DIGITS_APART,
    "refact": _DIGITS_APART,
    "command-r": _DIGITS_APART,
    "qwen2": _Split((_QWEN2,)),
    "deepseek-r1-qwen": _Split((_QWEN2,)),
    "llama-bpe": _LIKE_LLAMA3,
    "llama3": _LIKE_LLAMA3,
    "llama-v3": _LIKE_LLAMA3,
    "falcon3": _LIKE_LLAMA3,
    "dbrx": _Split((_LLAMA3,)),
    "smaug-bpe": _Split((_LLAMA3,)),
    "tekken": _Split((_TEKKEN,), whole_words=True, begins=True),
    "gpt-4o": _Split((_GPT4O,)),
}

_ENDS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>")
"""Tokens that end an answer, by their text: most files name one of them only."""


class Tokens(NamedTuple):
    """The lists of a file's tokenizer."""

    texts: list[str]
    types: list[int]

    def numbers(self, *types: int) -> list[int]:
        """Ids of the tokens of these types."""
        wanted = set(types)
        return [number for number, kind in enumerate(self.types) if kind in wanted]


def write_tokenizer(file: GGUFFile, folder: Path) -> list[int]:
    """Write tokenizer.json and tokenizer_config.json.

    Returns:
        The tokens that end an answer.

    Raises:
        ModelError: the tokenizer is of a kind that cannot be rebuilt, or its lists are damaged.
    """
    tokens = tokens_of(file)
    kind = file.value("tokenizer.ggml.model")
    if kind not in {"gpt2", "llama"}:
        raise ModelError(
            f"{str(file.path)!r} has a tokenizer of the kind {kind!r}, which cannot be converted"
        )
    try:
        tokenizer, begins = (_byte_level if kind == "gpt2" else _sentence_piece)(file, tokens)
        _add_tokens(tokenizer, file, tokens)
        if file.value("tokenizer.ggml.add_bos_token", begins):
            _begin_with_bos(tokenizer, file, tokens)
        tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    except ModelError:
        raise
    # The library raises bare Exception for lists that do not fit each other.
    except Exception as error:
        raise ModelError(f"the tokenizer of {str(file.path)!r} is damaged: {error}") from error
    _write_config(file, tokens, folder)
    return _end_ids(file, tokens)


def tokens_of(file: GGUFFile) -> Tokens:
    """The tokens of a file; raises ModelError if its lists do not fit each other."""
    texts = file.require("tokenizer.ggml.tokens")
    types = file.value("tokenizer.ggml.token_type")
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts[:1]):
        raise ModelError(f"tokenizer.ggml.tokens in {str(file.path)!r} is not a list of texts")
    if types is None:
        types = [int(TokenType.NORMAL)] * len(texts)
    if not isinstance(types, list) or len(types) != len(texts) or not texts:
        raise ModelError(
            f"{str(file.path)!r} has {len(texts)} tokens and not as many types of tokens"
        )
    return Tokens(texts, types)


def vocabulary_of(tokens: Tokens) -> dict[str, int]:
    """Token -> id, without the rows that only fill up the embedding."""
    return {
        text: number for number, text in enumerate(tokens.texts) if not _is_padding(tokens, number)
    }


def _is_padding(tokens: Tokens, number: int) -> bool:
    unused = tokens.types[number] != TokenType.NORMAL
    return unused and _PADDING.fullmatch(tokens.texts[number]) is not None


def _byte_level(file: GGUFFile, tokens: Tokens) -> tuple[Any, bool]:
    """BPE over bytes, and whether texts begin with the BOS token if the file does not say."""
    name = str(file.value("tokenizer.ggml.pre", "default"))
    split = _SPLITS.get(name)
    if split is None:
        known = ", ".join(sorted(_SPLITS))
        raise ModelError(
            f"{str(file.path)!r} splits texts in the way {name!r}, which is not known here; known "
            f"are {known}"
        )
    merges = []
    for merge in file.require("tokenizer.ggml.merges"):
        left, _, right = str(merge).partition(" ")
        merges.append((left, right))
    model = models.BPE(vocabulary_of(tokens), merges, ignore_merges=split.whole_words)
    tokenizer: Any = Tokenizer(model)
    steps: list[Any] = [
        pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in split.patterns
    ]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, split.begins


def _sentence_piece(file: GGUFFile, tokens: Tokens) -> tuple[Any, bool]:
    """BPE over characters whose merges are ordered by the scores of what they give.

    Texts begin with the BOS token if the file does not say otherwise.
    """
    scores = file.require("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens.texts):
        raise ModelError(f"{str(file.path)!r} has not as many scores as tokens")
    vocabulary = vocabulary_of(tokens)
    unknown = tokens.numbers(TokenType.UNKNOWN)
    model = models.BPE(
        vocabulary,
        [(left, right) for left, right, _ in _merges(vocabulary, tokens, scores)],
        unk_token=tokens.texts[unknown[0]] if unknown else None,
        fuse_unk=True,
        byte_fallback=bool(tokens.numbers(TokenType.BYTE)),
    )
    tokenizer: Any = Tokenizer(model)
    spaces = normalizers.Replace(" ", "▁")
    prefixed = bool(file.value("tokenizer.ggml.add_space_prefix", default=True))
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefixed else spaces
    )
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(
        [*steps, decoders.Strip(" ", 1, 0)] if prefixed else steps
    )
    return tokenizer, True


def _merges(
    vocabulary: dict[str, int], tokens: Tokens, scores: list[float]
) -> list[tuple[str, str, float]]:
    """All pairs of tokens that make a token, the best score first."""
    types = (TokenType.NORMAL, TokenType.USER_DEFINED, TokenType.UNUSED)
    found = [
        (left, right, scores[number])
        for number in tokens.numbers(*types)
        for left, right in _halves(tokens.texts[number], vocabulary)
    ]
    return sorted(found, key=lambda merge: -merge[2])


def _halves(text: str, vocabulary: dict[str, int]) -> Iterator[tuple[str, str]]:
    for place in range(1, len(text)):
        left, right = text[:place], text[place:]
        if left in vocabulary and right in vocabulary:
            yield left, right


def _add_tokens(tokenizer: Any, file: GGUFFile, tokens: Tokens) -> None:
    """Tokens that are found in a text as they are: control tokens, and those of the makers."""
    strips = "phi-3" in str(file.value("general.name", "")).lower().replace("phi3", "phi-3")
    kinds = (TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.UNKNOWN)
    added = [
        AddedToken(
            tokens.texts[number],
            special=tokens.types[number] in {TokenType.CONTROL, TokenType.UNKNOWN},
            normalized=False,
            rstrip=strips
            and re.fullmatch(r"<\|(?!endoftext).*\|>", tokens.texts[number]) is not None,
        )
        for number in tokens.numbers(*kinds)
        if tokens.texts[number]
    ]
    tokenizer.add_tokens(added)


def _begin_with_bos(tokenizer: Any, file: GGUFFile, tokens: Tokens) -> None:
    number = file.value("tokenizer.ggml.bos_token_id")
    if number is None:
        return
    text = _text(file, tokens, "bos", number)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[text, "$A"], pair=[text, "$A", text, "$B"], special_tokens=[(text, number)]
    )


def _text(file: GGUFFile, tokens: Tokens, name: str, number: Any) -> str:
    if not isinstance(number, int) or not 0 <= number < len(tokens.texts):
        raise ModelError(
            f"tokenizer.ggml.{name}_token_id in {str(file.path)!r} is {number!r}, which is no token"
        )
    return tokens.texts[number]


def _write_config(file: GGUFFile, tokens: Tokens, folder: Path) -> None:
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for name, key in names.items():
        number = file.value(f"tokenizer.ggml.{key}_token_id")
        if number is not None:
            config[name] = _text(file, tokens, key, number)
    template = file.value("tokenizer.chat_template")
    if isinstance(template, str):
        config["chat_template"] = template
    text = json.dumps(config, indent=1, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def _end_ids(file: GGUFFile, tokens: Tokens) -> list[int]:
    found: list[int] = []
    for name in ("eos", "eot", "eom"):
        number = file.value(f"tokenizer.ggml.{name}_token_id")
        if number is not None:
            _text(file, tokens, name, number)
            found.append(number)
    control = {tokens.texts[number]: number for number in tokens.numbers(TokenType.CONTROL)}
    found += [control[text] for text in _ENDS if text in control]
    return list(dict.fromkeys(found))
