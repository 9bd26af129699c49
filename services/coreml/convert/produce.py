"""One run of `ssd convert`: convert, compare, and only then move the folder into place."""

import sys
import time
from pathlib import Path

import msgspec

from protocol.decoding.vocabulary import read_vocabulary
from protocol.errors import ModelError, ParityError, UsageError
from protocol.jobs.convert import (
    ROUTES,
    ConvertEvent,
    ConvertProgress,
    ConvertResult,
    ConvertSettings,
)
from protocol.jobs.distill import TokenPrompt
from protocol.messages import Tokens
from protocol.process.files import atomic_folder, remove_leftovers
from services.coreml.convert.convert import convert
from services.coreml.costs import measure
from services.coreml.manifest import FILE_NAME, write_manifest
from services.coreml.model import open_model

_CALLS = 5


def say(event: ConvertEvent) -> None:
    """Print one line to stdout."""
    sys.stdout.write(msgspec.json.encode(event).decode() + "\n")
    sys.stdout.flush()


def produce(settings: ConvertSettings) -> None:
    """Convert and compare.

    Raises:
        ModelError: the model cannot be converted, or `out` is a folder of something else.
        ParityError: the package disagrees with the model; nothing is written.
    """
    out = Path(settings.out)
    if out.exists() and not (out / FILE_NAME).is_file():
        raise UsageError(f"{str(out)!r} exists and is not a converted model; name another --out")
    out.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(out.parent, out.name)
    with atomic_folder(out) as folder:
        result = _produce(settings, folder)
        if not result.passed:
            say(result)
            raise _below_threshold(settings, result)
    say(result)


def _produce(settings: ConvertSettings, folder: Path) -> ConvertResult:
    started = time.perf_counter()
    manifest = convert(settings, folder, lambda what, done: say(ConvertProgress(what, done)))
    seconds = time.perf_counter() - started
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / 1e6
    result = ConvertResult(out=settings.out, seconds=seconds, megabytes=size, passed=True)
    if settings.tokens and settings.prompts:
        result = _compare(settings, folder, result)
    parity = msgspec.to_builtins(result)
    write_manifest(folder, msgspec.structs.replace(manifest, parity=parity))
    return result


def _below_threshold(settings: ConvertSettings, found: ConvertResult) -> ParityError:
    compared = [one for one in (found.agreement, *found.routes.values()) if one is not None]
    least = min(one.greedy for one in compared)
    return ParityError(
        f"the package agrees with {settings.model!r} on {least:.3f} of the "
        f"tokens, below threshold {settings.threshold:g}; nothing was written"
    )


def _compare(settings: ConvertSettings, folder: Path, found: ConvertResult) -> ConvertResult:
    # MLX is needed for the comparison only.
    from services.coreml.convert import parity  # noqa: PLC0415

    say(ConvertProgress("comparing", 0.0))
    model = open_model(folder, settings.compute_units)
    prompts = parity.fit_prompts(_prompts(settings), model.slots, settings.tokens)
    author = Path(settings.target or settings.model)
    if model.manifest.tokenizer_fingerprint != read_vocabulary(author).fingerprint:
        raise ModelError(f"{settings.target!r} does not share the vocabulary of the model")
    say(ConvertProgress("writing the answers", 0.05))
    texts = list(parity.write_answers(author, prompts, settings.tokens))
    source = parity.ParityModel(Path(settings.model))
    target = parity.ParityModel(Path(settings.target)) if settings.target else None
    distributions = source.distributions(texts)
    say(ConvertProgress("comparing by tree", 0.35))
    tops = parity.candidates(model, texts)
    agreed = parity.agreement(distributions, tops)
    routes = {"tree": agreed} if settings.all_routes else {}
    for route in ROUTES[1:] if settings.all_routes else ():
        say(ConvertProgress(f"comparing by {route}", 0.6))
        routes[route] = parity.agreement(distributions, parity.candidates(model, texts, route))
    draft = own = None
    if target is not None:
        judged, size = target.distributions(texts), target.vocabulary.size
        draft = parity.acceptance(judged, size, tops)
        own = parity.acceptance(judged, size, parity.tops_of(distributions, tops[0].ids.shape[1]))
    say(ConvertProgress("compared", 1.0))
    unit = model.executor.compute_unit
    return msgspec.structs.replace(
        found,
        passed=all(one.greedy >= settings.threshold for one in (agreed, *routes.values())),
        agreement=agreed,
        routes=routes,
        draft=draft,
        model=own,
        costs=[] if unit == "reference" else measure(model, _CALLS),
        compute_unit=unit,
    )


def _prompts(settings: ConvertSettings) -> list[Tokens]:
    lines = Path(settings.prompts).read_bytes().splitlines()
    return [msgspec.json.decode(line, type=TokenPrompt).tokens for line in lines if line]
