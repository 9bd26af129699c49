"""What children are told: one strict JSON argument."""

import json
from pathlib import Path
from typing import Any

import pytest

from protocol.errors import UsageError
from protocol.settings import (
    BACKENDS,
    ChildSettings,
    DrafterSettings,
    OrchestratorSettings,
    VerifierSettings,
    decode_settings,
    encode_settings,
)

VERIFIER = VerifierSettings(lifeline=3, address="ipc:///s", model="/m", cores=[0, 1], threads=2)
DRAFTER = DrafterSettings(lifeline=4, address="ipc:///s", backend="ngram")
ORCHESTRATOR = OrchestratorSettings(
    lifeline=5,
    services_address="ipc:///s",
    clients_address="ipc:///c",
    run_dir="/r",
    model="/m ü",
    draft_timeout_s=0.5,
)
ALL = [VERIFIER, DRAFTER, ORCHESTRATOR]


@pytest.mark.parametrize("settings", ALL, ids=lambda s: type(s).__name__)
def test_settings_round_trip(settings: ChildSettings) -> None:
    """A child reads exactly what the supervisor wrote."""
    assert settings == decode_settings(encode_settings(settings), type(settings))


@pytest.mark.parametrize(
    ("settings", "changes"),
    [
        (VERIFIER, {"surprise": 1}),
        (DRAFTER, {"surprise": 1}),
        (ORCHESTRATOR, {"surprise": 1}),
        (VERIFIER, {"threads": 0}),
        (VERIFIER, {"threads": "2"}),
        (VERIFIER, {"prefill_step_size": 0}),
        (VERIFIER, {"lifeline": None}),
        (VERIFIER, {"cores": [0.5]}),
        (DRAFTER, {"backend": "psychic"}),
        (ORCHESTRATOR, {"concurrency": 0}),
        (ORCHESTRATOR, {"max_waiting": -1}),
        (ORCHESTRATOR, {"draft_timeout_s": 0}),
        (ORCHESTRATOR, {"verify_timeout_s": -1.0}),
    ],
    ids=str,
)
def test_wrong_settings_are_refused(settings: ChildSettings, changes: dict[str, Any]) -> None:
    """An unknown key, a wrong type or a value out of range is a UsageError that names it."""
    argument = json.dumps(json.loads(encode_settings(settings)) | changes)
    kind = type(settings)
    with pytest.raises(UsageError, match=f"{kind.__name__}: .*{next(iter(changes))}"):
        decode_settings(argument, kind)


@pytest.mark.parametrize("settings", ALL, ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("argument", ["", "{", "[]", "null", "{}", "\x00"])
def test_nonsense_is_refused(settings: ChildSettings, argument: str) -> None:
    """What is not the settings as JSON is a UsageError that names the kind."""
    with pytest.raises(UsageError, match=type(settings).__name__):
        decode_settings(argument, type(settings))


def test_settings_are_frozen() -> None:
    """Nothing changes a child's settings after its start."""
    with pytest.raises(AttributeError):
        VERIFIER.threads = 3  # type: ignore[misc]  # that it cannot be is the point


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_backend_may_be_named(backend: str) -> None:
    """The list of backends and the type of the field agree."""
    argument = json.dumps({"lifeline": 1, "address": "a", "backend": backend})
    assert backend == decode_settings(argument, DrafterSettings).backend


def test_an_orphaned_orchestrator_removes_its_run_folder(tmp_path: Path) -> None:
    """What the supervisor cannot clean up any more, the orchestrator does; others leave it."""
    folder = tmp_path / "run"
    (folder / "inner").mkdir(parents=True)
    settings = decode_settings(
        json.dumps(json.loads(encode_settings(ORCHESTRATOR)) | {"run_dir": str(folder)}),
        OrchestratorSettings,
    )
    VERIFIER.on_orphaned()
    assert folder.exists()
    settings.on_orphaned()
    assert not folder.exists()
    settings.on_orphaned()
