"""Training a tiny drafter in this process: it learns, resumes exactly, and can be deployed."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec
import numpy as np
import pytest

from protocol.errors import UsageError
from protocol.jobs.distill import DistillEvent, DistillFinished, DistillSettings
from protocol.messages import Sampling
from services.distill import checkpoint
from services.distill.batches import Batches, TrainingBatch
from services.distill.data import RowInfo, Shards, Texts, join_texts, split_texts
from services.distill.evaluation import DeployedDrafter, Figures, evaluate
from services.distill.phases import distill, judge
from services.distill.run_control import RunControl
from services.distill.speed import Costs, predict
from services.distill.training import learning_rate
from services.drafter.backends.mlx import MlxBackend
from services.mlx.loader import load
from services.tools.build_drafter import assemble
from tests.support.reference import drafts
from tests.support.tiny_models import write_tiny_model


class Quiet(RunControl):
    """Collects what is said, and asks to stop after so many events of training."""

    def __init__(self, stop_after: int = 1 << 30) -> None:
        super().__init__()
        self.heard: list[DistillEvent] = []
        self._stop_after = stop_after

    def say(self, event: DistillEvent) -> None:
        self.heard.append(event)

    @property
    def stopping(self) -> bool:
        trained = [e for e in self.heard if getattr(e, "phase", "") == "training"]
        return len(trained) >= self._stop_after

    @property
    def finished(self) -> DistillFinished:
        last = self.heard[-1]
        assert isinstance(last, DistillFinished)
        return last


@dataclass
class Run:
    """One complete run."""

    settings: DistillSettings
    session: Quiet
    out: Path

    @property
    def report(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self.out / "distill.json").read_text())
        return content


def settings_for(target: Path, out: Path, **changes: Any) -> DistillSettings:
    values: dict[str, Any] = {
        "lifeline": 0, "target": str(target), "out": str(out), "opening": [0, 2], "turn": [3],
        "stop_ids": [1], "length": 32, "user_tokens": 4, "data_batch": 64, "data_tokens": 3000,
        "batch": 16, "steps": 40, "learning_rate": 3e-3, "held_out": 0.1,
    }  # fmt: skip
    return msgspec.convert(values | changes, DistillSettings)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("t"), "llama")


@pytest.fixture(scope="module")
def done(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run with a trimmed head, never interrupted."""
    out = tmp_path_factory.mktemp("run") / "out"
    settings = settings_for(target, out, head_size=200)
    session = Quiet()
    distill(settings, session)
    return Run(settings, session, out)


def test_the_loss_falls(done: Run) -> None:
    """Cross-entropy falls by a tenth, and the validation's acceptance rises."""
    log = [e for e in done.report["log"] if e["objective"] == "ce"]
    assert log[-1]["loss"] < 0.9 * log[0]["loss"]
    assert done.report["log"][-1]["acceptance"] > log[0]["acceptance"]
    assert {e["objective"] for e in done.report["log"]} == {"ce", "tv"}


@pytest.mark.wide
def test_interrupted_and_resumed_is_uninterrupted(done: Run, tmp_path: Path) -> None:
    """Stopped after 7 and after 10 more steps, then resumed: the same weights, moments, log.

    To rounding: BLAS may sum in another order where an array lies elsewhere in memory. One
    step missed, repeated or with other data would change weights by about 1e-3.
    """
    settings = msgspec.structs.replace(done.settings, out=str(tmp_path / "out"))
    for stop_after in (7, 10):
        session = Quiet(stop_after)
        distill(settings, session)
        assert not session.finished.complete
    session = Quiet()
    distill(settings, session)
    assert session.finished.complete
    first, second = checkpoint.load(done.out), checkpoint.load(tmp_path / "out")
    assert first is not None
    assert second is not None
    assert first.position.step == second.position.step == done.settings.steps
    for one, other in (
        (first.weights, second.weights),
        (first.moments.first, second.moments.first),
        (first.moments.second, second.moments.second),
    ):
        assert one.keys() == other.keys()
        assert all(mx.allclose(one[name], other[name], rtol=0, atol=1e-5) for name in one)
    logs = [[(e.step, e.objective) for e in c.position.log] for c in (first, second)]
    assert logs[0] == logs[1]


def test_every_step_has_its_own_batch_once(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over two calls, steps 0 to 5 are asked for in order, none missed and none repeated."""
    asked: list[int] = []
    original = Batches.at

    def at(batches: Batches, step: int) -> TrainingBatch:
        asked.append(step)
        return original(batches, step)

    monkeypatch.setattr(Batches, "at", at)
    settings = settings_for(target, tmp_path / "out", steps=6, data_tokens=400)
    distill(settings, Quiet(stop_after=2))
    assert asked == [0, 1]
    distill(settings, Quiet())
    assert asked == [0, 1, 2, 3, 4, 5]


class Ticking:
    """A clock that a hundredth of a second passes on whenever somebody looks."""

    def __init__(self) -> None:
        self._looks = 0

    def monotonic(self) -> float:
        self._looks += 1
        return self._looks / 100


@pytest.mark.wide
def test_minutes_are_for_the_whole_run(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts take a third, training leaves a tenth, and what earlier calls took counts."""
    clock = Ticking()
    for module in ("run_control", "corpus", "training", "evaluation"):
        monkeypatch.setattr(f"services.distill.{module}.time", clock)
    changes: dict[str, Any] = {"minutes": 0.03, "steps": 0, "data_tokens": 0, "data_batch": 16}
    settings = settings_for(target, tmp_path / "out", **changes)
    stopped = Quiet(stop_after=5)
    distill(settings, stopped)
    assert not stopped.finished.complete
    assert 0 < stopped.run_left_s < 1.2

    control = Quiet()
    distill(settings, control)
    assert control.finished.complete
    report = json.loads((tmp_path / "out" / "distill.json").read_text())
    assert report["generation_seconds"] == pytest.approx(0.6, abs=0.1)
    assert report["training_seconds"] == pytest.approx(0.9 * 1.8 - 0.6, abs=0.15)
    assert control.run_left_s > 0


def test_the_texts_must_leave_time_for_training(target: Path, tmp_path: Path) -> None:
    """As many minutes for the texts as for the run are refused before anything is loaded."""
    settings = settings_for(target, tmp_path / "out", minutes=3, data_minutes=3, steps=0)
    with pytest.raises(UsageError, match=r"data_minutes 3 leave nothing of --minutes 3"):
        distill(settings, Quiet())


def test_another_run_is_refused(done: Run) -> None:
    """Other settings, or a folder of other things: one sentence, and nothing is touched."""
    other = msgspec.structs.replace(done.settings, layers=3)
    with pytest.raises(UsageError, match="layers: 2, now 3"):
        distill(other, Quiet())
    strange = msgspec.structs.replace(done.settings, out=str(done.out.parent))
    with pytest.raises(UsageError, match="other files"):
        distill(strange, Quiet())
    assert sorted(path.name for path in done.out.parent.iterdir()) == ["out"]


def test_a_full_disk_is_noticed_before(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too little space: refused before anything is generated."""

    class Usage:
        free = 1

    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage)
    with pytest.raises(UsageError, match="not enough disk space"):
        distill(settings_for(target, tmp_path / "out"), Quiet())
    assert not (tmp_path / "out" / "data").exists()


def test_the_drafter_drafts(done: Run) -> None:
    """The folder works as a draft model, offers only tokens of its head, and is a copy's copy."""
    backend = MlxBackend(done.out, prefill_step_size=16)
    for _ in backend.open(0, [0, 2, 20, 21], Sampling()):
        pass
    drafted = [one.token for one in drafts(backend.draft(0, 22, 8))]
    head = set(json.loads((done.out / "draft_head.json").read_text()))
    assert len(drafted) == 8
    assert set(drafted) <= head
    assert len(head) == 200


def test_the_carried_drafter_is_the_drafter(done: Run, target: Path, tmp_path: Path) -> None:
    """`carried` has no embedding; with the target's it predicts what the whole folder does."""
    carried = done.out / "carried"
    weights: Any = mx.load(str(carried / "model.safetensors"))
    assert not [name for name in weights if "embed" in name or "lm_head" in name]
    assert {array.dtype for array in weights.values()} == {mx.float16}
    assemble(carried, target, tmp_path)
    tokens = mx.array([[0, 2, 20, 21, 22]])
    one, other = (np.array(load(folder).module(tokens)) for folder in (done.out, tmp_path))
    np.testing.assert_allclose(one, other, atol=0.02)


@pytest.mark.parametrize(("family", "bits"), [("quantized", 0), ("llama3", 8)])
def test_other_heads_and_bits_are_carried_too(family: str, bits: int, tmp_path: Path) -> None:
    """Own heads, quantised targets, quantised drafters: whole and assembled drafter agree."""
    target = write_tiny_model(tmp_path / "t", family)
    out = tmp_path / "out"
    distill(settings_for(target, out, steps=2, data_tokens=400, bits=bits), Quiet())
    # A word about widths in a dense folder would make a loader quantise it.
    described = json.loads((out / "carried" / "config.json").read_text()).get("quantization")
    assert described == ({"group_size": 32, "bits": bits} if bits else None)
    carried: Any = mx.load(str(out / "carried" / "model.safetensors"))
    assert ("model.layers.0.self_attn.q_proj.scales" in carried) == (bits > 0)
    assemble(out / "carried", target, tmp_path / "again")
    tokens = mx.array([[0, 2, 20, 21, 22]])
    one, other = (np.array(load(f).module(tokens)) for f in (out, tmp_path / "again"))
    np.testing.assert_allclose(one, other, atol=0.05)


def test_texts_of_other_runs(done: Run, target: Path, tmp_path: Path) -> None:
    """A run given the texts of two others learns from both, and generates none."""
    texts = [str(done.out), str(tmp_path / "other")]
    other = settings_for(target, Path(texts[1]), steps=1, data_tokens=800, seed=5)
    distill(other, Quiet())
    out = tmp_path / "out"
    distill(settings_for(target, out, steps=2, texts=texts), Quiet())
    assert not (out / "data").exists()
    parts = [Shards(Path(run, "data")).read() for run in texts]
    report = json.loads((out / "distill.json").read_text())
    learned = join_texts(parts)
    assert len(learned.rows) == sum(len(part.rows) for part in parts)
    assert report["validation_sequences"] == len(split_texts(learned, 0.1, 4)[1].rows)
    with pytest.raises(UsageError, match="different length"):
        join_texts(
            [parts[0], Texts(parts[1].tokens[:, :16], parts[1].kinds[:, :16], parts[1].rows)]
        )


def test_judging_again_gives_the_same_figures(done: Run) -> None:
    """`--evaluate` on the run's held-out texts repeats the card."""
    session = Quiet()
    judge(msgspec.structs.replace(done.settings, evaluate_only=True), session)
    assert done.report["figures"] == session.finished.figures["figures"]


def test_the_target_is_its_own_best_drafter(done: Run, target: Path) -> None:
    """The target as drafter: all figures are 1 (rounding aside); noise is really shared."""
    texts = Shards(done.out / "data").read()
    _, held = split_texts(texts, 0.1, 4)
    model = load(target).module
    figures = evaluate(model, DeployedDrafter(load(target).module, None), 288, held, 8)
    assert figures.positions == int((held.kinds == 3).sum())
    assert figures.greedy_agreement == 1
    for one in figures.acceptance:
        assert one.coupled == 1
        assert one.rejection == pytest.approx(1, abs=1e-4)
    assert set(figures.hits.values()) == {1.0}


class Fixed:
    """A model that says the same everywhere."""

    def __init__(self, logits: list[float]) -> None:
        self._logits = mx.array(logits)
        self.model: Any = lambda tokens, cache: mx.zeros((*tokens.shape, 1))

    def __call__(self, tokens: mx.array) -> mx.array:
        hidden = self.model(tokens, cache=None)
        return mx.broadcast_to(self._logits, (*hidden.shape[:2], self._logits.size))


def test_figures_are_counted_rightly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Agreement, ranks in a trimmed head, categories: by hand on fixed laws, in chunks."""
    monkeypatch.setattr("services.distill.logits.MOST_LOGITS", 8)  # two positions
    target = Fixed([0.0, 3.0, 1.0, 2.0])
    drafter = DeployedDrafter(Fixed([5.0, 4.0, 1.0]), np.array([3, 1, 2]))
    kinds = np.array([[1, 3, 3, 0], [1, 3, 3, 3]], np.uint8)
    infos = [RowInfo(0, 0.0, "chat"), RowInfo(1, 1.0, "code")]
    texts = Texts(np.zeros((2, 4), np.int32), kinds, infos)
    figures = evaluate(target, drafter, 4, texts, 2)
    assert (figures.positions, figures.greedy_positions) == (5, 2)
    assert figures.greedy_agreement == 0
    assert figures.by_category == {"chat": 0.0}
    assert figures.hits == {"1": 0, "2": 1, "3": 1, "4": 1, "8": 1, "16": 1}
    assert set(figures.hits_after_rejection.values()) == {1.0}
    p = np.exp([0, 3, 1, 2]) / np.exp([0, 3, 1, 2]).sum()
    q = np.exp([5, 4, 1]) / np.exp([5, 4, 1]).sum()
    at_one = next(one for one in figures.acceptance if one.temperature == 1)
    assert at_one.rejection == pytest.approx(np.minimum(p[[3, 1, 2]], q).sum(), rel=1e-4)


def test_the_learning_rate_rises_and_falls() -> None:
    """Up to its highest within the warm-up, and down to two hundredths."""
    settings = DistillSettings(lifeline=0, target="", out="", warmup=0.1)
    rates = [learning_rate(settings, spent) for spent in (0, 0.05, 0.1, 0.5, 1.0)]
    assert rates[0] < rates[1] < rates[2] > rates[3] > rates[4]
    assert rates[4] == pytest.approx(0.02 * settings.learning_rate)


def test_predicted_speed() -> None:
    """By hand: perfect agreement and a free drafter give E(K) / T_v(K+1); a bad one gives 1."""
    sure = {str(width): 1.0 for width in (1, 2, 3, 4, 8, 16)}
    none = dict.fromkeys(sure, 0.0)
    good = figures_of(1.0, sure)
    costs = Costs({"1": 10.0, "2": 12.0, "5": 16.0}, {"1": 1.0, "4": 2.0})
    best = predict(good, costs)
    assert (best.num_draft_tokens, best.branches) == (4, 1)
    assert best.speed_up == pytest.approx(5 / 1.6, rel=0.01)
    assert predict(figures_of(0.0, none), costs).speed_up == 1


def figures_of(agreement: float, hits: dict[str, float]) -> Any:
    return Figures(1, 1, agreement, {}, [], hits, hits)
