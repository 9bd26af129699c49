"""The pipeline with a CoreML drafter, on the reference runtime: plain decoding's tokens."""

import atexit
import shutil
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from launch.models.own_drafters import default_drafter
from launch.models.pair import pair_of
from launch.settings.settings import StackSettings
from launch.stack.control import ask_supervisor
from orchestrator.text.tokenizer import TargetTokenizer
from protocol.jobs.convert import ConvertSettings
from protocol.messages import ChatMessage, Done, Sampling, SwapDrafter
from services.coreml.convert.convert import convert
from services.coreml.manifest import read_manifest
from services.coreml.model import ConvertedModel
from services.coreml.runtime.executor import ReferenceExecutor
from services.drafter.backends.coreml import CoremlBackend
from services.drafter.backends.mlx import MlxBackend
from tests.support.converted import converted_folder, source_folder
from tests.support.reference import said
from tests.support.stack import DEADLINE_S, RunningStack, eventually, running

QUESTION = "Give me four tips for growing tomatoes on a balcony."
ANSWER = (
    "Here are four tips for growing tomatoes on a balcony: 1. Choose a sunny spot. Tomatoes "
    "need at least six hours of direct sunlight a day. 2. Use a large pot with good drainage."
)
LAWS = {"greedy": Sampling(), "T0.8": Sampling(temperature=0.8, seed=5)}


@pytest.fixture(scope="module")
def tiny() -> Iterator[RunningStack]:
    settings = StackSettings(
        model=str(source_folder("qwen3")),
        draft_model=str(converted_folder("llama")),
        compute_units="reference",
    )
    with running(settings) as started:
        started.warm_up()
        yield started


@pytest.mark.processes
@pytest.mark.parametrize("law", LAWS)
def test_answers_are_those_of_plain_decoding(tiny: RunningStack, law: str) -> None:
    """A converted folder named as draft model is drafted with, and changes no token."""
    services = {service.role: service.backend for service in tiny.client.status().services}
    assert services["drafter"] == "coreml"
    plain = tiny.answer("the quick fox", mode="ar", sampling=LAWS[law], max_tokens=24)
    answer = tiny.until(
        lambda answer: answer.statistics.drafted > 0,
        "drafts come in time",
        lambda: tiny.answer("the quick fox", sampling=LAWS[law], max_tokens=24, num_draft_tokens=3),
    )
    assert plain.tokens == answer.tokens


@pytest.mark.processes
def test_swapped_in_and_out(tiny: RunningStack) -> None:
    """`ssd swap-drafter` exchanges a coreml drafter for another and back."""
    plain = tiny.answer("a lazy dog", mode="ar", max_tokens=12).tokens
    name = tiny.supervisor.run_dir.path.name
    for backend, model in (("ngram", ""), ("coreml", str(converted_folder("llama")))):
        swap = SwapDrafter(backend=backend, model=model)
        assert ask_supervisor(name, swap, DEADLINE_S) == Done()
        eventually(lambda: tiny.client.status().draft_backend == backend, backend)  # noqa: B023
        assert tiny.answer("a lazy dog", max_tokens=12).tokens == plain


# ---------------------------------------------------------------- the default drafter


@cache
def default_converted() -> Path:
    """The default drafter, converted once for all tests."""
    base = Path(tempfile.mkdtemp(prefix="ssd-coreml-"))
    atexit.register(shutil.rmtree, base, ignore_errors=True)
    out = base / "drafter"
    settings = ConvertSettings(lifeline=0, model=str(default_drafter()), out=str(out))
    convert(settings, out, lambda what, share: None)
    return out


@pytest.mark.model
def test_the_default_drafter_drafts_what_mlx_drafts() -> None:
    """Over a real answer, both backends' drafts differ at ties at most: acceptance is the same."""
    folder = default_converted()
    model = ConvertedModel(folder, ReferenceExecutor(folder, read_manifest(folder)))
    tokenizer = TargetTokenizer(default_drafter())
    text = tokenizer.encode([ChatMessage("user", QUESTION), ChatMessage("assistant", ANSWER)])
    drafts = []
    for backend in (CoremlBackend(model), MlxBackend(default_drafter(), 512)):
        for _ in backend.open(1, text[:-40], Sampling()):
            pass
        found = []
        for at in range(len(text) - 40, len(text)):
            found += [layer.tokens[0] for layer in said(backend.draft(1, text[at], 2))]
            backend.commit(1, at, [text[at]])
        drafts.append(found)
    same = sum(a == b for a, b in zip(*drafts, strict=True))
    assert len(drafts[0]) == 80
    assert same >= 79


@pytest.mark.processes
@pytest.mark.model
def test_the_default_pair_drafts_trees_on_the_reference_runtime() -> None:
    """Real pair, SSD mode: tokens identical to plain decoding, and drafts are accepted.

    Outcomes are hit only where the reference runtime is no slower than the target.
    """
    settings = StackSettings(
        draft_backend="coreml",
        draft_model=str(default_converted()),
    )
    assert pair_of(settings).backend == "coreml"
    with running(settings) as stack:
        plain = stack.answer(QUESTION, mode="ar", max_tokens=16)
        answer = stack.until(
            lambda answer: answer.statistics.accepted > 0,
            "a draft is accepted",
            lambda: stack.answer(QUESTION, max_tokens=16, num_draft_tokens=1),
        )
    assert plain.tokens == answer.tokens
