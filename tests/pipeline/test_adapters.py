"""LoRA adapters: mlx-lm's own tokens, drafts or not, and nothing remembered across adapters."""

import shutil
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

from launch.models.pair import pair_of
from launch.settings.settings import StackSettings
from launch.stack.session import _fits
from launch.workers.reference import ReferenceWorker
from protocol.errors import ModelError, UsageError
from protocol.jobs.reference import DecodeRequest
from protocol.messages import Sampling, Tokens
from tests.support.stack import Answered, running
from tests.support.tiny_models import write_adapter, write_tiny_model

PROMPT: Tokens = [5, 9, 17, 33, 65, 40, 21, 8] * 3
SAMPLED = Sampling(temperature=0.8, seed=3)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> StackSettings:
    """A quantised target with an adapter, and a drafter that is near the bare target."""
    folder = tmp_path_factory.mktemp("models")
    target = write_tiny_model(folder / "target", "quantized")
    drafter = write_tiny_model(folder / "drafter", "llama", layers=2, noise=0.01)
    adapter = write_adapter(folder / "adapter", target)
    write_adapter(folder / "other", target, seed=1)
    return StackSettings(model=str(target), draft_model=str(drafter), adapter_path=str(adapter))


def replace(settings: StackSettings, adapter: str, **changes: str) -> StackSettings:
    """The same stack with another adapter, or none."""
    path = str(Path(settings.adapter_path).with_name(adapter)) if adapter else ""
    return StackSettings(
        model=settings.model, draft_model=settings.draft_model, adapter_path=path, **changes
    )


class Spoken(NamedTuple):
    """What one stack with the adapter answered."""

    greedy: Answered
    drafted: Answered
    plain: Answered
    ssd: Answered
    fits: list[bool]
    """Whether the stack is for who wants no adapter, or another."""
    prefixes: Path
    """The prompt cache that it saved."""


@pytest.fixture(scope="module")
def spoken(models: StackSettings, tmp_path_factory: pytest.TempPathFactory) -> Spoken:
    """A stack with the adapter and a drafter."""
    prefixes = tmp_path_factory.mktemp("kept") / "prefixes"
    with running(replace(models, "adapter", prompt_cache_file=str(prefixes))) as stack:
        greedy = stack.answer("", tokens=PROMPT, mode="ar", max_tokens=24)
        drafted = stack.until(
            lambda answer: answer.statistics.drafted > 0,
            "drafts come in time",
            lambda: stack.answer("", tokens=PROMPT, mode="sd", max_tokens=24, num_draft_tokens=3),
        )
        plain, ssd = (
            stack.answer("", tokens=PROMPT, mode=mode, max_tokens=24, sampling=SAMPLED)
            for mode in ("ar", "ssd")
        )
        others = (replace(models, ""), replace(models, "other"))
        fits = [_fits(stack.supervisor.run_dir, wanted) for wanted in others]
    return Spoken(greedy, drafted, plain, ssd, fits, prefixes)


def ask(models: StackSettings, adapter: str, prefixes: Path) -> Answered:
    """Plain decoding in a stack of its own, without a draft model, with a copy of these."""
    copy = shutil.copy(prefixes, prefixes.with_name(f"{adapter or 'bare'} prefixes"))
    settings = replace(models, adapter, prompt_cache_file=str(copy))
    plain = msgspec.structs.replace(settings, draft_model="", draft_backend="ngram")
    with running(plain) as stack:
        return stack.answer("", tokens=PROMPT, mode="ar", max_tokens=24)


@pytest.fixture(scope="module")
def bare(models: StackSettings, spoken: Spoken) -> Answered:
    """The answer without an adapter."""
    return ask(models, "", spoken.prefixes)


@pytest.mark.processes
def test_an_adapter_speaks_through_every_way_of_decoding(
    models: StackSettings, spoken: Spoken, bare: Answered
) -> None:
    """Plain decoding gives the tokens of mlx-lm with the adapter; drafts change none of them."""
    with ReferenceWorker(pair_of(models)) as reference:
        question = DecodeRequest(
            tokens=PROMPT, max_tokens=24, sampling=Sampling(), num_draft_tokens=0, stop_ids=[1]
        )
        expected = reference.decode(question).tokens
    assert spoken.greedy.tokens == expected
    assert spoken.drafted.tokens == expected
    assert spoken.ssd.tokens == spoken.plain.tokens
    assert spoken.fits == [False, False]
    assert bare.tokens != expected


@pytest.mark.processes
def test_prefixes_are_not_shared_between_adapters(
    models: StackSettings, spoken: Spoken, bare: Answered
) -> None:
    """A prompt cache that was saved with an adapter is used with it, and with no other."""
    again, other = (ask(models, adapter, spoken.prefixes) for adapter in ("adapter", "other"))
    cached = [answer.cached_tokens > 0 for answer in (spoken.greedy, again, other, bare)]
    assert cached == [False, True, False, False]
    assert again.tokens == spoken.greedy.tokens


def test_a_folder_without_an_adapter_is_refused(models: StackSettings, tmp_path: Path) -> None:
    """By name, before anything starts; and so is what takes no adapter."""
    with pytest.raises(ModelError, match=r"has no adapter_config\.json"):
        pair_of(StackSettings(model=models.model, adapter_path=str(tmp_path)))
    with pytest.raises(UsageError, match="--adapter-path"):
        pair_of(StackSettings(model=models.model, adapter_path=models.adapter_path, target_ranks=2))


@pytest.mark.processes
def test_an_adapter_of_another_model_is_refused(
    models: StackSettings, run_dir: Path, tmp_path: Path
) -> None:
    """With a sentence that names the adapter."""
    wide = write_tiny_model(tmp_path / "wide", "llama", config={"hidden_size": 128, "head_dim": 32})
    foreign = write_adapter(tmp_path / "foreign", wide)
    settings = StackSettings(model=models.model, adapter_path=str(foreign))
    with pytest.raises(ModelError, match=r"cannot use the adapter '.*foreign'"), running(settings):
        pass
