"""The phases of a distillation, in order: texts, training, drafter, figures."""

import math
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import msgspec
import numpy as np
from mlx.utils import tree_flatten

from protocol.decoding.sampler import Ids
from protocol.decoding.vocabulary import read_vocabulary
from protocol.errors import ModelError, UsageError
from protocol.jobs.distill import DistillFinished, DistillNote, DistillSettings
from services.distill import card, checkpoint
from services.distill.batches import Batches
from services.distill.corpus import Corpus, chat_of, read_prompts
from services.distill.data import ANSWER, USER, RowInfo, Shards, Texts, join_texts, split_texts
from services.distill.evaluation import DeployedDrafter, Figures, evaluate
from services.distill.export import Trained, export
from services.distill.generation import Rows, generate
from services.distill.logits import TargetDistribution, check_layout
from services.distill.run_control import RunControl
from services.distill.run_folder import RunFolder, read_description
from services.distill.speed import Costs, measure, predict
from services.distill.student import (
    Student,
    chosen_layers,
    drafter_config,
    frequent_ids,
    new_student,
    read_config,
    start_from,
)
from services.distill.training import Budget, Trainer
from services.kernels.register import kernels
from services.mlx.lm_head import trim_head
from services.mlx.loader import LoadedModel, load, to_dense, windows_of

# A Mac's GPU shares its memory with everything else; a CUDA card's is its own.
_ROWS = {"cpu": 8, "metal": 64, "cuda": 1024}
_BATCH = {"cpu": 4, "metal": 8, "cuda": 64}
_SPARE_BYTES = 64_000_000
_EVALUATION_SHARE = 0.1
"""Share of a run's time that is reserved for the phases after training."""


class _Plan(NamedTuple):
    """Shape of the drafter."""

    layers: list[int]
    config: dict[str, Any]
    dtype: mx.Dtype


def distill(settings: DistillSettings, control: RunControl) -> None:
    """Train a drafter, or resume training; ends early if the session stops."""
    folder = RunFolder(settings)
    try:
        _distill(settings, control, folder)
    finally:
        folder.close()


def _distill(settings: DistillSettings, control: RunControl, folder: RunFolder) -> None:
    _check_minutes(settings)
    target, plan = _target(settings), _plan(settings)
    folder.check_space(_estimate_bytes(settings, target.module, plan))
    state = checkpoint.load(folder.path)
    trained_s = 0.0 if state is None else state.position.seconds
    if not settings.steps:
        generating_s = sum(info.seconds for info in folder.shards.infos())
        control.limit_run(60 * settings.minutes, generating_s + trained_s)
    # Once training has begun its texts are fixed.
    if state is None and not _fill_texts(settings, folder, target, control):
        control.say(DistillFinished(out=settings.out, complete=False))
        return
    sources = _sources(settings, folder)
    texts = join_texts([source.read() for source in sources])
    learned, held = split_texts(texts, settings.held_out, len(settings.temperatures))
    head_ids = _head_ids(settings, learned, target.vocabulary.size)
    student = new_student(target.module, plan.config, plan.layers, head_ids, plan.dtype)
    if settings.init_drafter:
        start_from(student, Path(settings.init_drafter))
    trainer = _trainer(settings, student, target, (learned, held))
    budget = _training_budget(settings, control, trained_s)
    save = partial(checkpoint.save, folder.path)
    state = trainer.run(state or trainer.start(), budget, control, save)
    if budget.share(state.position) < 1:
        control.say(DistillFinished(out=settings.out, complete=False))
        return
    control.say(DistillNote("training is done; writing and evaluating the drafter"))
    drafter = Trained(state.weights, plan.config, head_ids)
    export(folder.path, target, drafter, settings.bits)
    figures = _judge(settings, target, folder.path, held, control.run_left_s)
    costs = measure(target, folder.path, [int(token) for token in held.tokens[0]])
    seconds = sum(info.seconds for source in sources for info in source.infos())
    facts = _Facts(learned, held, seconds, head_ids)
    report = _report(settings, plan, state, facts, (figures, costs))
    card.write(folder.path, report)
    control.say(_finish_event(settings, report))


def _fill_texts(
    settings: DistillSettings, folder: RunFolder, target: LoadedModel, control: RunControl
) -> bool:
    """Generate the run's own texts, if it has any; False if the session stopped it."""
    if settings.texts:
        return True
    corpus = Corpus(settings, folder.shards, _rows(settings))
    filled = corpus.fill(target.module, target.vocabulary.size, control)
    # The buffers of generation have other shapes than those of training.
    mx.clear_cache()
    return filled


def _training_budget(settings: DistillSettings, control: RunControl, trained_s: float) -> Budget:
    """Return the time for training over all calls: at least one step."""
    reserved_s = _EVALUATION_SHARE * 60 * settings.minutes
    return Budget(settings.steps, max(1e-9, trained_s + control.run_left_s - reserved_s))


def _check_minutes(settings: DistillSettings) -> None:
    if not settings.steps and settings.data_minutes >= settings.minutes and not settings.texts:
        raise UsageError(
            f"data_minutes {settings.data_minutes:g} leave nothing of --minutes "
            f"{settings.minutes:g} for training; --minutes is for the whole run"
        )


def judge(settings: DistillSettings, control: RunControl) -> None:
    """Recompute a drafter's figures, on given prompts or on the run's held-out texts."""
    target = _target(settings)
    folder = Path(settings.out)
    if settings.prompts:
        texts = _greedy_answers(settings, target, control)
    else:
        known = read_description(folder)
        if known is None:
            raise UsageError(f"{settings.out!r} holds no run with held-out texts; give --prompts")
        runs = known["texts"] or [folder]
        everything = join_texts([Shards(Path(run, "data")).read() for run in runs])
        _, texts = split_texts(everything, known["held_out"], len(known["temperatures"]))
    figures = _judge(settings, target, folder, texts)
    control.say(
        DistillFinished(
            out=settings.out, complete=True, figures={"figures": msgspec.to_builtins(figures)}
        )
    )


def _sources(settings: DistillSettings, folder: RunFolder) -> list[Shards]:
    """Return the folders of the run's texts: its own, or those of the given runs."""
    return [Shards(Path(run, "data")) for run in settings.texts] or [folder.shards]


# ---------------------------------------------------------------- models


def _dtype(settings: DistillSettings) -> mx.Dtype:
    name: str = settings.precision
    if name == "auto":
        name = "float32" if not kernels().on_gpu else "bfloat16"
    chosen: mx.Dtype = getattr(mx, name)
    return chosen


def _target(settings: DistillSettings) -> LoadedModel:
    """Load the target, dense: with many tokens at once that is faster everywhere."""
    target = load(Path(settings.target))
    check_layout(target.module)
    windows_of(target.module)
    to_dense(target.module, _dtype(settings))
    mx.eval(target.module.parameters())
    return target


def _plan(settings: DistillSettings) -> _Plan:
    config = read_config(Path(settings.target))
    chosen = chosen_layers(config["num_hidden_layers"], settings.layers, settings.init_layers)
    return _Plan(
        chosen,
        drafter_config(config, chosen, settings.mlp),
        _dtype(settings),
    )


def _head_ids(settings: DistillSettings, texts: Texts, vocabulary: int) -> Ids | None:
    if not settings.head_size or settings.head_size >= vocabulary:
        return None
    chosen = texts.tokens[(texts.kinds == ANSWER) | (texts.kinds == USER)]
    stops = [token for token in settings.stop_ids if token < vocabulary]
    return frequent_ids(chosen.astype(np.int64), vocabulary, settings.head_size, stops)


def _estimate_bytes(settings: DistillSettings, target: Any, plan: _Plan) -> int:
    """Estimate disk usage: two checkpoints of weights and moments, the drafter twice, the texts."""
    flat: Any = tree_flatten(target.parameters())
    inner = sum(a.size for name, a in flat if name.startswith("model.layers."))
    shared = sum(a.size for name, a in flat if not name.startswith("model.layers."))
    trained: int = inner * len(plan.layers) // max(1, len(target.layers))
    needed: int = _SPARE_BYTES + 28 * trained + 4 * shared + 5 * settings.data_tokens
    return needed


# ---------------------------------------------------------------- phases


def _trainer(
    settings: DistillSettings,
    student: Student,
    target: LoadedModel,
    texts: tuple[Texts, Texts],
) -> Trainer:
    learned, held = texts
    head = None if student.head_ids is None else mx.array(student.head_ids)
    batch = _training_batch(settings)
    return Trainer(
        settings,
        student,
        TargetDistribution(target.module, target.vocabulary.size, head),
        batches=Batches(learned, batch, user_weight=settings.user_weight, seed=settings.seed),
        validation=Batches(held, min(batch, len(held.rows))),
    )


def _training_batch(settings: DistillSettings) -> int:
    return settings.batch or _BATCH[kernels().device]


def _rows(settings: DistillSettings) -> int:
    return settings.data_batch or _ROWS[kernels().device]


def _greedy_answers(settings: DistillSettings, target: LoadedModel, control: RunControl) -> Texts:
    """Return the target's own greedy answers to the given prompts."""
    prompts = read_prompts(settings)
    step = _rows(settings)
    parts = []
    for start in range(0, len(prompts), step):
        some = prompts[start : start + step]
        rows = Rows(
            [prompt.tokens for prompt in some],
            invents=False,
            temperatures=[0.0] * len(some),
            length=settings.length,
            seed=settings.seed,
        )
        made = generate(
            target.module,
            target.vocabulary.size,
            rows,
            chat_of(settings),
            lambda: control.stopping,
        )
        if made is None:
            raise UsageError("stopped before the target had answered")
        infos = [RowInfo(start + i, 0.0, prompt.category) for i, prompt in enumerate(some)]
        parts.append(Texts(made[0], made[1].astype(np.uint8), infos))
    return join_texts(parts)


def _judge(
    settings: DistillSettings,
    target: LoadedModel,
    folder: Path,
    texts: Texts,
    seconds: float = math.inf,
) -> Figures:
    """Return the figures of the deployed drafter in `folder`, in about this time."""
    drafter = load(folder)
    if drafter.vocabulary.fingerprint != target.vocabulary.fingerprint:
        raise ModelError(f"{str(folder)!r} does not share the target's vocabulary")
    check_layout(drafter.module)
    head_ids = trim_head(drafter.module, folder)
    deployed = DeployedDrafter(drafter.module, head_ids)
    size = target.vocabulary.size
    return evaluate(
        target.module, deployed, size, texts, _training_batch(settings), seconds=seconds
    )


class _Facts(NamedTuple):
    """Facts about the texts and the head, for a report."""

    learned: Texts
    held: Texts
    seconds: float
    head_ids: Ids | None


def _report(
    settings: DistillSettings,
    plan: _Plan,
    state: checkpoint.TrainingCheckpoint,
    facts: _Facts,
    verdict: tuple[Figures, Costs],
) -> card.DistillReport:
    figures, costs = verdict
    whole = read_vocabulary(Path(settings.target)).size
    return card.DistillReport(
        target=settings.target,
        compute_unit=kernels().device,
        layers=plan.layers,
        parameters=sum(array.size for array in state.weights.values()),
        head_size=whole if facts.head_ids is None else len(facts.head_ids),
        training_tokens=int((facts.learned.kinds == ANSWER).sum()),
        validation_sequences=len(facts.held.rows),
        generation_seconds=facts.seconds,
        training_seconds=state.position.seconds,
        peak_memory_gb=mx.get_peak_memory() / 1e9,
        steps=state.position.step,
        figures=figures,
        costs=costs,
        prediction=predict(figures, costs),
        settings=settings,
        log=state.position.log,
    )


def _finish_event(settings: DistillSettings, report: card.DistillReport) -> DistillFinished:
    names = ("figures", "costs", "prediction")
    figures = {name: msgspec.to_builtins(getattr(report, name)) for name in names}
    return DistillFinished(out=settings.out, complete=True, figures=figures)
