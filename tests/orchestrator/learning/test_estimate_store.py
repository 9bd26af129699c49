"""What was learned survives a run, fades soon, and never stands in the way."""

import errno
import logging
import os
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from launch.settings.settings import StackSettings
from orchestrator.learning.averages import Ema
from orchestrator.learning.cost_model import ORIGINS, CostModel
from orchestrator.learning.estimate_store import EstimateStore
from orchestrator.learning.fan_out import AFTER_ALL
from orchestrator.learning.hit_curve import HitCurve
from orchestrator.learning.latency import VerifyLatency
from orchestrator.learning.saguaro import CHOICES
from orchestrator.learning.snapshot import EstimateSnapshot
from orchestrator.learning.speculation_switch import SpeculationSwitch
from orchestrator.registry import Peer
from orchestrator.sequence.planner import Planner
from protocol.messages import PROTOCOL_VERSION, Hello, Mode, Role
from tests.support.fakes import observed
from tests.support.stack import RunningStack, eventually, running
from tests.support.tiny_models import write_tiny_model

MODES: tuple[Mode, ...] = ("sd", "ssd")


def taught(rounds: int = 300, *, gain: bool = True, seed: int = 1) -> CostModel:
    """After rounds of drafts that stand (or fall), on a machine where two tokens cost 30 ms."""
    estimates, random = CostModel(), Random(seed)  # noqa: S311  # no secret depends on it
    for _ in range(rounds):
        plan = Planner("ssd", estimates)
        speculating = plan.should_speculate
        estimates.observe_step(1, 8, 9.0)
        estimates.observe_step(2, random.choice([4, 8, 16]), 5.0 + random.random())
        estimates.saguaro.observe(random.choice(CHOICES), 2, 30.0)
        round_ = observed(
            speculating=speculating,
            origin=random.choice(ORIGINS),
            confidences=[0.55] if speculating else [],
            accepted=int(gain and speculating),
            prepared=4 if speculating else 0,
            rank=2,
            verify_ms=30.0 if speculating else 20.0,
            idle_ms=1.0,
        )
        estimates.observe_round(round_)
    return estimates


def again(estimates: CostModel) -> CostModel:
    """The estimates of the next run."""
    copy = CostModel()
    copy.restart(msgspec.json.decode(msgspec.json.encode(estimates.save()), type=EstimateSnapshot))
    return copy


def opinions(estimates: CostModel) -> list[float]:
    """What a planner would ask."""
    found = [estimates.verify_latency.of(m) for m in range(1, 6)]
    found += [estimates.plain_latency.of(1), estimates.draft_token_ms, estimates.tree_step_ms.value]
    found.append(estimates.draft_length)
    found += [estimates.step_latency.of(b) for b in (1, 8, 32)]
    found += [estimates.step_latency.chain_ms, estimates.tree_width.save().chosen]
    found += [arm.tokens / arm.milliseconds for arm in estimates.saguaro.save().values()]
    estimates.batch.streams = 4
    for mode in MODES:
        crowd = estimates.switch(mode)
        assert crowd is not None
        found += [crowd.speculative_tok_s, crowd.plain_tok_s, crowd.speculating]
    estimates.batch.streams = 1
    for origin in ORIGINS:
        found += [estimates.calibrations[origin].rate(c / 10) for c in range(11)]
        found += [estimates.after_rejection[origin].hit(f) for f in range(8)]
        found += [estimates.after_all[origin].hit(f) for f in range(8)]
        found += [estimates.idle_ms[origin].value, estimates.acceptance[origin].value]
    for pace in estimates.switches.values():
        found += [pace.speculative_tok_s, pace.plain_tok_s]
    return found


def test_how_backups_fared_is_remembered_a_little() -> None:
    """A rate far from what is assumed moves towards it, and counts for few samples."""
    estimates = CostModel()
    assert estimates.save().backups is None
    estimates.observe_step(1, 8, 9.0)  # what is assumed is the rate of hits
    before = estimates.backup_rate
    backed_up = observed(
        origin="miss", confidences=[0.9] * 4, accepted=4, verify_ms=30.0, idle_ms=1.0
    )
    for _ in range(100):
        estimates.observe_round(backed_up)
    assert before < again(estimates).backup_rate < estimates.backup_rate


def test_what_fared_in_crowds_is_remembered() -> None:
    """Four requests whose drafts fell begin the next run plainly; one alone does not."""
    estimates = CostModel()
    estimates.batch.streams = 4
    for _ in range(60):
        pace = estimates.switch("ssd")
        assert pace is not None
        pace.observe(2.0, 60.0 if pace.speculating else 40.0, accepted=0, chains=4)
    later = again(estimates)
    later.batch.streams = 4
    in_crowd, alone = later.switch("ssd"), later.switches["ssd"]
    assert in_crowd is not None
    assert not in_crowd.speculating
    assert in_crowd.plain_tok_s == pytest.approx(50.0)
    assert alone.speculating
    later.restart(None)
    forgotten = later.switch("ssd")
    assert forgotten is not None
    assert forgotten.speculating


def test_old_files_are_understood() -> None:
    """A file of before, without the newer parts, is a memory still."""
    told = msgspec.to_builtins(taught().save())
    for newer in ("step_latency", "tree_width", "backups", "batch_trials", "saguaro"):
        del told[newer]
    fresh = CostModel()
    fresh.restart(msgspec.convert(told, EstimateSnapshot))
    assert not fresh.step_latency.is_known
    assert fresh.verify_latency.of(2) == pytest.approx(30.0)


@pytest.mark.parametrize("accepted", [0, 1])
@pytest.mark.parametrize("rounds", [0, 3, 300])
def test_the_next_run_begins_where_this_one_ends(rounds: int, accepted: int) -> None:
    """Every estimate comes back as it was."""
    estimates = taught(rounds, gain=accepted > 0)
    assert opinions(estimates) == pytest.approx(opinions(again(estimates)))


def test_to_begin_without_a_memory_is_to_know_nothing() -> None:
    """Another pair does not inherit what was learned of the one before."""
    estimates = taught()
    assert opinions(estimates) != opinions(CostModel())
    estimates.restart(None)
    assert opinions(CostModel()) == opinions(estimates)


def test_remembered_costs_keep_their_shape_at_todays_speed() -> None:
    """One measurement on a machine that is now half as fast corrects all lengths."""
    cost, today = VerifyLatency(), VerifyLatency()
    for tokens, milliseconds in [(1, 10.0), (2, 11.0), (5, 40.0)]:
        cost.observe(tokens, milliseconds)
    today.restore(cost.save())
    assert [today.of(m) for m in (1, 2, 5)] == [10.0, 11.0, 40.0]
    today.observe(2, 22.0)
    assert pytest.approx([today.of(m) for m in (1, 2, 5)]) == [20.0, 22.0, 80.0]
    assert today.save() == pytest.approx({1: 20.0, 2: 22.0, 5: 80.0})


def test_what_was_measured_elsewhere_does_not_scale_the_memory() -> None:
    """Where today's and the remembered lengths have none in common, only today's count."""
    today = VerifyLatency()
    today.restore({5: 40.0})
    today.observe(1, 10.0)
    fresh = VerifyLatency()
    fresh.observe(1, 10.0)
    assert fresh.of(5) == today.of(5)


def test_a_remembered_mean_yields_to_a_few_samples() -> None:
    """After five samples the present counts for more than the past."""
    mean, today = Ema(), Ema()
    for _ in range(1000):
        mean.observe(100.0)
    today.restore(mean.save())
    for _ in range(5):
        today.observe(0.0)
    assert today.value < 50.0


def test_remembered_curves_yield_to_a_text() -> None:
    """Thirty rounds of the present weigh more than a thousand of the past."""
    curve, today = HitCurve(AFTER_ALL), HitCurve(AFTER_ALL)
    for _ in range(1000):
        curve.observe(0, 4)
    today.restore(curve.save())
    assert today.hit(1) > 0.95
    for _ in range(30):
        today.observe(None, 4)
    assert today.hit(1) < 0.5


def test_a_loss_is_remembered_for_a_short_pause() -> None:
    """Where speculation did not pay, the next run begins plainly, and tries again soon."""
    losing = taught(200, gain=False)
    assert not losing.switches["ssd"].speculating
    pace = again(losing).switches["ssd"]
    rounds = 0
    while not pace.speculating:
        pace.observe(1, 20.0, accepted=0)
        rounds += 1
    assert 10 < rounds < 64
    assert again(taught(gain=True)).switches["ssd"].speculating


def test_a_remembered_baseline_is_measured_anew_before_it_ends_speculation() -> None:
    """A machine that is slower than remembered does not make speculation look bad."""
    pace, today = SpeculationSwitch(), SpeculationSwitch()
    for _ in range(200):
        pace.observe(2 if pace.speculating else 1, 25.0 if pace.speculating else 20.0, accepted=1)
    today.restore(pace.save())
    paused = 0
    for _ in range(200):
        today.observe(
            2 if today.speculating else 1, 75.0 if today.speculating else 60.0, accepted=1
        )
        paused += not today.speculating
    assert today.plain_tok_s == pytest.approx(1e3 / 60, rel=0.3)
    assert 0 < paused < 10


# ---------------------------------------------------------------- files


def hello(role: Role, model: str, **changes: Any) -> Peer:
    told: dict[str, Any] = {
        "protocol": PROTOCOL_VERSION,
        "role": role,
        "pid": 1,
        "backend": "mlx",
        "model": model,
        "tokenizer_fingerprint": "f00d",
        "vocabulary_size": 10,
        "context_length": 0,
        "compute_unit": "cpu",
        "max_draft_tokens": 64,
    }
    return Peer(b"1", Hello(**{**told, **changes}))


def pair(model: str = "large", **changes: Any) -> dict[Role, Peer]:
    return {
        "verifier": hello("verifier", model),
        "drafter": hello("drafter", "small", **changes),
    }


def met(folder: Path, peers: dict[Role, Peer], machine: str = "chip") -> EstimateStore:
    memory = EstimateStore(str(folder), machine)
    memory.load_for(peers)
    return memory


def remembered(folder: Path) -> float:
    """Leaves a memory of the default pair; returns T_v(1)."""
    memory = met(folder, pair())
    memory.cost_model.verify_latency.observe(1, 77.0)
    memory.save()
    return 77.0


def test_a_pair_finds_its_own_memory(tmp_path: Path) -> None:
    """The same pair on the same machine begins with what was learned; no other does."""
    expected = remembered(tmp_path / "learned")
    assert expected == met(tmp_path / "learned", pair()).cost_model.verify_latency.of(1)
    others = [
        met(tmp_path / "learned", pair(model="other")),
        met(tmp_path / "learned", pair(backend="ngram")),
        met(tmp_path / "learned", pair(compute_unit="ane")),
        met(tmp_path / "learned", pair(), machine="other chip"),
        met(tmp_path / "elsewhere", pair()),
    ]
    assert [VerifyLatency().of(1)] * 5 == [
        other.cost_model.verify_latency.of(1) for other in others
    ]


def test_new_weights_are_another_model(tmp_path: Path) -> None:
    """A model folder whose weights were replaced does not inherit the old ones' memory."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"old")
    memory = met(tmp_path, pair(model=str(model)))
    memory.cost_model.verify_latency.observe(1, 77.0)
    memory.save()
    assert met(tmp_path, pair(model=str(model))).cost_model.verify_latency.of(1) == 77.0
    (model / "model.safetensors").write_bytes(b"newer")
    assert met(tmp_path, pair(model=str(model))).cost_model.verify_latency.of(1) != 77.0


def test_half_a_pair_has_no_memory(tmp_path: Path) -> None:
    """Before both services are there, nothing is read or written."""
    memory = EstimateStore(str(tmp_path), "chip")
    memory.load_for({"verifier": hello("verifier", "large")})
    memory.save()
    memory.save_if_due(1e9)
    assert list(tmp_path.iterdir()) == []


def test_without_a_folder_there_is_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Switched off, it writes nothing and forgets nothing when a drafter is exchanged."""
    monkeypatch.chdir(tmp_path)
    memory = EstimateStore("", "chip")
    memory.load_for(pair())
    memory.cost_model.verify_latency.observe(1, 77.0)
    memory.load_for(pair(backend="ngram"))
    memory.save()
    assert memory.cost_model.verify_latency.of(1) == 77.0
    assert list(tmp_path.iterdir()) == []


def test_an_exchanged_drafter_has_a_memory_of_its_own(tmp_path: Path) -> None:
    """A swap saves what was learned of the old pair, and begins anew with the new one."""
    memory = met(tmp_path, pair())
    memory.cost_model.verify_latency.observe(1, 77.0)
    held = memory.cost_model
    memory.load_for(pair(backend="ngram"))
    assert held.verify_latency.of(1) == VerifyLatency().of(1)
    memory.load_for(pair())
    assert held.verify_latency.of(1) == 77.0


def test_a_restarted_drafter_changes_nothing(tmp_path: Path) -> None:
    """The same drafter in a new process is the same pair."""
    memory = met(tmp_path, pair())
    memory.cost_model.verify_latency.observe(1, 77.0)
    memory.load_for(pair(pid=2))
    assert memory.cost_model.verify_latency.of(1) == 77.0
    assert list(tmp_path.iterdir()) == []


def test_it_is_saved_now_and_then(tmp_path: Path) -> None:
    """Once a minute, not at every call."""
    memory = met(tmp_path, pair())
    memory.save_if_due(100.0)
    [file] = tmp_path.iterdir()
    file.unlink()
    memory.save_if_due(130.0)
    assert list(tmp_path.iterdir()) == []
    memory.save_if_due(161.0)
    assert [file] == list(tmp_path.iterdir())


BROKEN = {
    "empty": b"",
    "cut": b'{"version":1,"verify_cost":{"1":',
    "not json": b"\x00\xff",
    "another version": b'{"version":2}',
    "a key too many": b"+",
    "a negative time": b"-",
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_memory_is_ignored(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever is in the file, the run begins, as if there were none, and says so."""
    remembered(tmp_path)
    [file] = tmp_path.iterdir()
    content = msgspec.json.decode(file.read_bytes())
    if kind == "a key too many":
        content["new"] = 1
    if kind == "a negative time":
        content["verify_latency"]["1"] = -1.0
    spoilt = kind in ("a key too many", "a negative time")
    file.write_bytes(msgspec.json.encode(content) if spoilt else BROKEN[kind])
    with caplog.at_level(logging.WARNING):
        memory = met(tmp_path, pair())
    assert str(file) in caplog.text
    assert memory.cost_model.verify_latency.of(1) == VerifyLatency().of(1)
    memory.cost_model.verify_latency.observe(1, 55.0)
    memory.save()
    assert met(tmp_path, pair()).cost_model.verify_latency.of(1) == 55.0


def test_tables_of_another_size_are_ignored() -> None:
    """A memory whose tables have other places than ours leaves ours as they are."""
    learned = msgspec.to_builtins(taught().save())
    for table in ("calibrations", "after_rejection", "after_all"):
        for shares in learned[table].values():
            shares["parts"].pop()
            shares["wholes"].pop()
    estimates = CostModel()
    estimates.restart(msgspec.convert(learned, EstimateSnapshot, strict=False))
    for origin in ORIGINS:
        assert estimates.calibrations[origin].rate(0.55) == pytest.approx(0.55)
        assert estimates.after_all[origin].hit(3) == HitCurve(AFTER_ALL).hit(3)


def test_a_folder_that_cannot_be_written_is_no_failure(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A full or forbidden disk costs the memory, not the answer."""
    (tmp_path / "learned").write_text("a file, not a folder")
    memory = met(tmp_path / "learned", pair())
    with caplog.at_level(logging.WARNING):
        memory.save()
    assert "cannot save" in caplog.text


def test_a_full_disk_leaves_no_part_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What could not be written as a whole is removed again."""
    memory = met(tmp_path, pair())
    memory.save()
    before = sorted(tmp_path.iterdir())

    def fill(path: Path, data: bytes) -> int:
        with path.open("wb") as file:
            file.write(data[:3])
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(Path, "write_bytes", fill)
    memory.save()
    assert before == sorted(tmp_path.iterdir())


def test_what_the_dead_left_is_removed(tmp_path: Path) -> None:
    """A process that was killed while it wrote: its file goes, that of a living one stays."""
    (tmp_path / ".aa.99999999.x.tmp").touch()
    (tmp_path / f".bb.{os.getpid()}.x.tmp").touch()
    met(tmp_path, pair())
    assert [tmp_path / f".bb.{os.getpid()}.x.tmp"] == list(tmp_path.iterdir())


@pytest.mark.processes
@pytest.mark.usefixtures("run_dir")
def test_stacks_remember(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stack leaves one file, and the next of the same pair knows whether speculation pays;
    without a memory it is neither read nor written."""
    monkeypatch.setenv("SSD_CACHE_DIR", str(tmp_path / "cache"))
    folders = [str(write_tiny_model(tmp_path / name, "llama", seed=1)) for name in "td"]
    settings = StackSettings(model=folders[0], draft_model=folders[1])

    def plain_tok_s(stack: RunningStack, tokens: int) -> float:
        return stack.answer("Say it again.", max_tokens=tokens).statistics.plain_tok_s

    with running(settings, memory=True) as stack:
        # The faster the drafter, the fewer rounds an answer has; plain ones come in time.
        eventually(lambda: plain_tok_s(stack, 300) > 0.0, "plain decoding is measured")
    [file] = (tmp_path / "cache" / "learned").iterdir()
    assert file.suffix == ".json"
    saved = msgspec.json.decode(file.read_bytes())
    assert saved["trials"]["ssd"]["plain"]["tokens"] > 0.0
    assert saved["saved_at"] > 0.0
    saved["trials"]["ssd"]["pausing"] = True
    file.write_bytes(msgspec.json.encode(saved))
    with running(settings, memory=True) as stack:
        recalled = stack.client.status().planner
    assert not recalled.speculating
    # What another run measured is used, and not stated.
    assert recalled.speculative_tok_s == recalled.plain_tok_s == 0.0
    left = file.read_bytes(), file.stat().st_mtime_ns
    with running(settings) as stack:
        assert stack.client.status().planner.speculating
    assert left == (file.read_bytes(), file.stat().st_mtime_ns)
    assert [file] == list(file.parent.iterdir())
