"""Prompts are tokenised once, and those that cost too much cost their own request only."""

import contextlib
import json
import os
import select
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from orchestrator.text import grammar_check, prompt_encoder
from orchestrator.text.prompt_encoder import INLINE_BYTES, PromptEncoder, PromptLimits, Result
from orchestrator.text.tokenizer import TargetTokenizer
from orchestrator.text.worker_process import WorkerProcess
from protocol.decoding.grammar import json_grammar
from protocol.errors import Busy, ServiceLost, UsageError
from protocol.messages import (
    ChatMessage,
    EncodePrompt,
    Generate,
    LogitsOptions,
    PromptTokens,
    Sampling,
    Tokens,
)
from protocol.settings import TextWorkerSettings

DEADLINE_S = 60.0
LIMITS = PromptLimits(max_bytes=100_000, timeout_s=30.0, memory_bytes=0)
TEMPLATE = (
    "{% for i in range(rounds or 1) %}{% for j in range(rounds or 1) %}{% endfor %}{% endfor %}"
    "{% set ns = namespace(text='x') %}"
    "{% for i in range(doublings or 0) %}{% set ns.text = ns.text ~ ns.text %}{% endfor %}"
    "{% for m in messages %}{{ ns.text if doublings }}"
    "{% if m['content'].strip() == 'hang' %}"
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    "{% elif m['content'] == 'much' %}{% for i in range(9999) %}the quick fox {% endfor %}"
    "{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
)
LONG = "the quick fox " * (INLINE_BYTES // 10)

Make = Callable[..., PromptEncoder]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with a tokenizer and a template that the client can make costly."""
    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the quick fox"], trainer)
    path = tmp_path_factory.mktemp("model")
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return path


@pytest.fixture
def make(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Encoders whose workers are ended after the test; grammars have time on a busy machine."""
    monkeypatch.setattr(grammar_check, "_LONGEST_S", DEADLINE_S)
    made: list[PromptEncoder] = []

    def create(limits: PromptLimits = LIMITS) -> PromptEncoder:
        made.append(PromptEncoder(TargetTokenizer(folder), str(folder), limits))
        return made[-1]

    yield create
    for encoder in made:
        encoder.close()


def chat(number: int, content: str, **options: Any) -> Generate:
    message = ChatMessage(role="user", content=content)
    return Generate(request=number, messages=[message], template_options=options)


def wait(encoder: PromptEncoder) -> dict[int, Result]:
    """The next results, by the client's number."""
    assert select.select([encoder.descriptor], [], [], DEADLINE_S)[0]
    return {message.request: result for _, message, result in encoder.collect()}


def wait_for(encoder: PromptEncoder, count: int) -> dict[int, Result]:
    """The next so many results, in whichever company they come."""
    results: dict[int, Result] = {}
    while len(results) < count:
        results |= wait(encoder)
    return results


def expected(folder: Path, text: str) -> Tokens:
    return TargetTokenizer(folder).encode_text(text)


def test_short_prompts_are_tokenised_at_once(make: Make, folder: Path) -> None:
    """Without a process, or a wait."""
    encoder = make()
    assert encoder.encode((b"c", 1), Generate(request=1, text="the fox")) == expected(
        folder, "the fox"
    )
    assert encoder.encode((b"c", 2), chat(2, "the fox")) == expected(folder, "the fox")
    assert encoder.encode((b"c", 3), Generate(request=3, tokens=[7, 8])) == [7, 8]
    assert len(encoder) == 0


def test_workers_parse_special_tokens_if_asked_to(tmp_path: Path, folder: Path) -> None:
    """A long prompt gets the tokens that the encoder's own tokenizer gives it."""
    tokenizer: Any = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    shutil.copy(folder / "tokenizer_config.json", tmp_path)
    parsing = TargetTokenizer(tmp_path, parse_special=True)
    message = chat(1, LONG + "<|end|>")
    with contextlib.closing(
        PromptEncoder(parsing, str(tmp_path), LIMITS, parse_special=True)
    ) as encoder:
        assert encoder.encode((b"c", 1), message) is None
        tokens = wait(encoder)[1]
    assert tokens == parsing.encode(message.messages)
    assert tokens != TargetTokenizer(tmp_path).encode(message.messages)


def watch_workers(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, str]]:
    """What the workers are given from now on: which one, and the prompt's text."""
    ask, prompts = WorkerProcess.ask, []

    def noted(worker: Any, message: Any, *limits: float) -> Any:
        if isinstance(message, EncodePrompt):
            prompts.append((worker, message.text))
        return ask(worker, message, *limits)

    monkeypatch.setattr(WorkerProcess, "ask", noted)
    return prompts


def test_long_prompts_are_tokenised_elsewhere_and_once(
    make: Make, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever asks for the same prompt meanwhile gets the same result; later it is known."""
    prompts = watch_workers(monkeypatch)
    encoder = make()
    for number in (1, 2, 3):
        assert encoder.encode((b"c", number), Generate(request=number, text=LONG)) is None
    assert encoder.cancel((b"c", 3))
    assert not encoder.cancel((b"c", 9))
    assert (len(encoder), (b"c", 1) in encoder, (b"c", 3) in encoder) == (2, True, False)
    tokens = expected(folder, LONG)
    assert wait(encoder) == {1: tokens, 2: tokens}
    assert len(encoder) == 0
    assert encoder.encode((b"c", 4), Generate(request=4, text=LONG)) == tokens
    assert [text for _, text in prompts] == [LONG]


def test_equal_prompts_with_equal_grammars_are_prepared_once(
    make: Make, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same prompt with another grammar is another job."""
    prompts = watch_workers(monkeypatch)
    encoder = make()
    for number, grammar in enumerate(("start: /a/", "start: /a/", "start: /b/")):
        message = grammatical(number, grammar, text=LONG)
        assert encoder.encode((b"c", number), message) is None
    results = wait_for(encoder, 3)
    assert results == dict.fromkeys(range(3), expected(folder, LONG))
    assert len(prompts) == 2


def test_nobody_waits_for_a_very_long_prompt(make: Make, folder: Path) -> None:
    """It has a worker of its own: while that hangs, other long prompts are answered."""
    encoder = make(PromptLimits(max_bytes=0, timeout_s=DEADLINE_S, memory_bytes=0))
    hanging = chat(1, "hang" + " " * prompt_encoder._VERY_LONG_BYTES)
    assert encoder.encode((b"c", 1), hanging) is None
    for number in (2, 3):
        text = LONG + "fox " * number
        assert encoder.encode((b"c", number), Generate(request=number, text=text)) is None
        assert wait(encoder) == {number: expected(folder, text)}
    assert (b"c", 1) in encoder


def test_a_prompt_that_is_too_long_is_refused_unseen(make: Make) -> None:
    """With the limit, and the setting's name."""
    with pytest.raises(UsageError, match=r"100,000 \(max_prompt_bytes\)"):
        make().encode((b"c", 1), Generate(request=1, text="a" * 100_001))


@pytest.mark.processes
def test_a_template_that_takes_too_long_is_ended(make: Make, folder: Path) -> None:
    """Its request is refused with the limit; the next one gets a new worker."""
    encoder = make(PromptLimits(max_bytes=0, timeout_s=5.0, memory_bytes=0))
    assert encoder.encode((b"c", 1), chat(1, "the fox", rounds=99_999)) is None
    assert encoder.encode((b"c", 2), Generate(request=2, text=LONG)) is None
    results = wait_for(encoder, 2)
    refused = results[1]
    assert isinstance(refused, UsageError)
    assert "within 5 s (prompt_timeout_s)" in str(refused)
    assert results[2] == expected(folder, LONG)


def test_a_template_that_takes_too_much_memory_is_refused(make: Make, folder: Path) -> None:
    """The sandbox does not bound the length of a string; the process does."""
    encoder = make(PromptLimits(max_bytes=0, timeout_s=30.0, memory_bytes=256 * 1024**2))
    assert encoder.encode((b"c", 1), chat(1, "the fox", doublings=40)) is None
    refused = wait(encoder)[1]
    assert isinstance(refused, UsageError)
    assert encoder.encode((b"c", 2), Generate(request=2, text=LONG)) is None
    assert wait(encoder)[2] == expected(folder, LONG)


@pytest.mark.processes
def test_a_template_that_hangs_on_a_short_prompt_hangs_elsewhere(make: Make, folder: Path) -> None:
    """This process gives up soon, the worker at its deadline; from then on it renders them all."""
    encoder = make(PromptLimits(max_bytes=0, timeout_s=5.0, memory_bytes=0))
    started = time.process_time()
    assert encoder.encode((b"c", 1), chat(1, "hang")) is None
    assert time.process_time() - started < 10.0
    refused = wait(encoder)[1]
    assert isinstance(refused, UsageError)
    assert "within 5 s (prompt_timeout_s)" in str(refused)
    assert encoder.encode((b"c", 2), chat(2, "the fox")) is None
    assert wait(encoder)[2] == expected(folder, "the fox")


def test_a_template_that_makes_much_of_a_short_prompt(make: Make, folder: Path) -> None:
    """A hundred kilobytes of text are not tokenised here."""
    encoder = make()
    assert encoder.encode((b"c", 1), chat(1, "much")) is None
    assert wait(encoder)[1] == expected(folder, "the quick fox " * 9_999)


def test_what_the_template_refuses_comes_back_as_its_sentence(make: Make) -> None:
    """From the worker as from here."""
    encoder = make()
    assert encoder.encode((b"c", 1), chat(1, "the fox", rounds="many")) is None
    refused = wait(encoder)[1]
    assert isinstance(refused, UsageError)
    assert "the chat template refuses these messages" in str(refused)


def grammatical(number: int, grammar: str, **others: Any) -> Generate:
    sampling = Sampling(logits_options=LogitsOptions(grammar=grammar))
    return Generate(request=number, sampling=sampling, **others)


def test_a_grammar_is_checked_before_its_request_is_admitted(make: Make, folder: Path) -> None:
    """One that can be used costs a wait once; one that cannot is refused, then at once."""
    encoder = make()
    good, bad = 'start: "fox" | "cat"', "start: /(/"
    assert encoder.encode((b"c", 1), grammatical(1, good, text="the fox")) is None
    assert encoder.encode((b"c", 2), grammatical(2, bad, tokens=[7, 8])) is None
    results = wait_for(encoder, 2)
    assert results[1] == expected(folder, "the fox")
    assert "cannot be used" in str(results[2])
    assert encoder.encode((b"c", 3), grammatical(3, good, tokens=[7, 8])) == [7, 8]
    assert encoder.encode((b"c", 4), grammatical(4, good, text="fox")) == expected(folder, "fox")
    with pytest.raises(UsageError, match="cannot be used"):
        encoder.encode((b"c", 5), grammatical(5, bad, text="the fox"))


@pytest.mark.processes
def test_grammars_do_not_keep_prompts_waiting(
    make: Make, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long prompt is ready beside one that never compiles, which is refused at its deadline;
    what waits too long may come again."""
    checker = partial(grammar_check.GrammarChecker, deadline_s=2.0)
    monkeypatch.setattr(prompt_encoder, "GrammarChecker", checker)
    encoder = make()
    endless = json_grammar({"type": "integer", "multipleOf": 999_983})
    assert encoder.encode((b"c", 1), grammatical(1, "start: /x/", tokens=[7])) is None
    assert wait(encoder) == {1: [7]}
    monkeypatch.setattr(prompt_encoder, "_WAIT_S", 1.5)
    assert encoder.encode((b"c", 2), grammatical(2, endless, text="the fox")) is None
    assert encoder.encode((b"c", 3), grammatical(3, "start: /y/", text="the fox")) is None
    assert encoder.encode((b"c", 4), Generate(request=4, text=LONG)) is None
    results = wait_for(encoder, 3)
    assert isinstance(results[2], UsageError)
    assert "to compile; simplify" in str(results[2])
    assert isinstance(results[3], Busy)
    assert results[4] == expected(folder, LONG)


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_worker_lost_on_the_way_is_replaced(
    folder: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Killed or stopped by others: a fresh one answers; after two the request may come again."""
    left: list[int] = []
    exchange = WorkerProcess._exchange

    def strike(self: WorkerProcess, *arguments: Any) -> Any:
        if left and self._process is not None:
            os.kill(self._process.pid, left.pop())
        return exchange(self, *arguments)

    monkeypatch.setattr(WorkerProcess, "_exchange", strike)
    settings = TextWorkerSettings(lifeline=0, model=str(folder))
    prompt = EncodePrompt(text="the quick fox")
    with WorkerProcess(settings, "tokenises prompts") as worker:
        for strikes in (1, 2, 0):
            left[:] = [number] * strikes
            if strikes > 1:
                with pytest.raises(ServiceLost, match="try again"):
                    worker.ask(prompt, DEADLINE_S)
            else:
                assert isinstance(worker.ask(prompt, DEADLINE_S), PromptTokens)
