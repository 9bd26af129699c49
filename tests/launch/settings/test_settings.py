"""Settings of a stack: flag > environment > file > default, and nothing unknown."""

import os
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest

from launch.commands import convert, distill, generate, serve
from launch.settings.flags import read_more
from launch.settings.machine import share_cores
from launch.settings.options import WITHOUT_FLAG, settings_of, stack_options
from launch.settings.paths import cache_dir, run_base
from launch.settings.settings import StackSettings, stack_settings
from protocol.errors import UsageError
from protocol.jobs.convert import ConvertSettings
from protocol.jobs.distill import DistillSettings
from tests.chaos.chaos import _flags


@pytest.fixture(autouse=True)
def _nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty folder and no variable of ours."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("SSD_")]:
        monkeypatch.delenv(name)


def file(text: str) -> None:
    Path("ssd.toml").write_text(text, encoding="utf-8")


def test_nothing_given_is_the_defaults() -> None:
    """Without flag, variable and file, the struct's own defaults are in force."""
    assert StackSettings() == stack_settings({})


@pytest.mark.parametrize(
    ("in_file", "in_environment", "in_flags", "expected"),
    [
        (None, None, None, 5),
        (1, None, None, 1),
        (None, 2, None, 2),
        (None, None, 3, 3),
        (1, 2, None, 2),
        (1, None, 3, 3),
        (None, 2, 3, 3),
        (1, 2, 3, 3),
    ],
)
def test_flags_win_over_environment_over_file_over_default(
    monkeypatch: pytest.MonkeyPatch,
    in_file: int | None,
    in_environment: int | None,
    in_flags: int | None,
    expected: int,
) -> None:
    """The nearest of the places that name a key decides it."""
    if in_file is not None:
        file(f"restarts = {in_file}")
    if in_environment is not None:
        monkeypatch.setenv("SSD_RESTARTS", str(in_environment))
    flags = {} if in_flags is None else {"restarts": in_flags}
    assert expected == stack_settings(flags).restarts


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--draft-lines", "--draft-command", "python -m mine", "--set", "max_waiting=0"],
    ],
    ids=" ".join,
)
def test_flags_can_be_handed_on(flags: list[str]) -> None:
    """Options of a stack, read and written again, are the same."""
    command = stack_options()(click.Command("launch", callback=lambda **_: None))
    options = command.make_context("launch", list(flags)).params
    assert options == command.make_context("launch", _flags(options)).params
    assert sorted(_flags(options)) == sorted(flags)


def test_places_complete_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each key is decided on its own."""
    file('model = "from file"\ndraft_timeout_s = 2')
    monkeypatch.setenv("SSD_DRAFT_MODEL", "from environment")
    expected = StackSettings(
        model="from file",
        draft_model="from environment",
        draft_timeout_s=2.0,
        draft_backend="ngram",
    )
    assert expected == stack_settings({"draft_backend": "ngram"})


@pytest.mark.parametrize("field", msgspec.structs.fields(StackSettings), ids=lambda f: f.name)
def test_every_setting_has_its_variable(
    monkeypatch: pytest.MonkeyPatch, field: msgspec.structs.FieldInfo
) -> None:
    """`SSD_` and the key in capitals sets any key, numbers included."""
    words = {
        "draft_backend": "ngram",
        "draft_lines": "True",
        "http": "True",
        "strict": "True",
        "parse_special": "True",
        "compute_units": "all",
        "log_level": "debug",
        "prefill": "coreml",
        "draft_weights": "int8",
        "metal_kernels": "on",
        "cpu_activations": "float",
        "preset": "creative",
    }
    devices = {"target_device": "gpu", "draft_device": "cuda:1"}
    value: Any = {**words, **devices}.get(field.name, "7")
    monkeypatch.setenv(f"SSD_{field.name.upper()}", value)
    actual = getattr(stack_settings({}), field.name)
    assert str(actual).removesuffix(".0") == value


def test_unknown_keys_in_the_file_are_refused() -> None:
    """A misspelt key is a UsageError that names the file and the key."""
    file("restart = 3")
    with pytest.raises(UsageError, match=r"ssd\.toml: .*'restart'"):
        stack_settings({})


def test_unknown_variables_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A misspelt variable is a UsageError that names the environment and the key."""
    monkeypatch.setenv("SSD_MODLE", "x")
    with pytest.raises(UsageError, match=r"the environment \(SSD_\*\): .*'modle'"):
        stack_settings({})


def test_unknown_flags_are_refused() -> None:
    """A key that the command line made up is a UsageError."""
    with pytest.raises(UsageError, match="'modle'"):
        stack_settings({"modle": "x"})


@pytest.mark.parametrize(
    "text",
    [
        "restarts = -1",
        "restarts = 1.5",
        'restarts = "many"',
        'draft_backend = "psychic"',
        "draft_timeout_s = 0",
        "prefill_step_size = 0",
        "model = 3",
        "[restarts]\nx = 1",
    ],
)
def test_wrong_values_are_refused(text: str) -> None:
    """A value of a wrong type or out of range is a UsageError that names file and key."""
    file(text)
    key = text.split(" ", maxsplit=1)[0].strip("[]\nx")
    with pytest.raises(UsageError, match=rf"ssd\.toml: .*{key}"):
        stack_settings({})


def test_wrong_values_are_refused_even_if_overridden(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken file stays broken when a flag hides its value."""
    file("restarts = -1")
    monkeypatch.setenv("SSD_RESTARTS", "2")
    with pytest.raises(UsageError, match=r"ssd\.toml"):
        stack_settings({"restarts": 1})


@pytest.mark.parametrize("content", [b"restarts = ", b"\xff\xfe", b"a = 1\na = 2"])
def test_unreadable_files_are_refused(content: bytes) -> None:
    """A file that is not TOML is a UsageError that names it."""
    Path("ssd.toml").write_bytes(content)
    with pytest.raises(UsageError, match=r"'ssd\.toml' cannot be read"):
        stack_settings({})


def test_the_folders_have_variables_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """SSD_RUN_DIR and SSD_CACHE_DIR move the folders and are no settings of a stack."""
    monkeypatch.setenv("SSD_RUN_DIR", "/r")
    monkeypatch.setenv("SSD_CACHE_DIR", "/c")
    assert (Path("/r"), Path("/c")) == (run_base(), cache_dir())
    assert StackSettings() == stack_settings({})


def test_the_folders_have_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run folders are per user in the temporary folder; models are cached in the home folder."""
    monkeypatch.setenv("HOME", "/home/somebody")
    assert run_base().name == f"ssd-{os.getuid()}"
    assert Path("/home/somebody/.cache/ssd") == cache_dir()


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="cores are pinned on Linux only")
@pytest.mark.parametrize(
    ("cores", "backend", "verifier", "drafter"),
    [
        ({0}, "mlx", [], [0]),
        ({2, 3}, "mlx", [2], [3]),
        ({0, 1, 2, 3}, "mlx", [0, 1, 2], [3]),
        (set(range(8)), "mlx", [0, 1, 2, 3, 4, 5], [6, 7]),
        ({2, 3}, "ngram", [2], [3]),
        (set(range(8)), "ngram", [0, 1, 2, 3, 4, 5, 6], [7]),
    ],
    ids=str,
)
def test_cores_are_shared_out(
    monkeypatch: pytest.MonkeyPatch,
    cores: set[int],
    backend: Any,
    verifier: list[int],
    drafter: list[int],
) -> None:
    """Target and drafter get disjoint cores, the target most of them."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: cores)
    shared = share_cores(backend)
    if len(cores) == 1:
        assert not set(shared.verifier) & set(shared.drafter)
        return
    assert (verifier, drafter) == (shared.verifier, shared.drafter)


def test_what_follows_two_dashes_is_no_flag() -> None:
    """A prompt may look like one."""
    context = generate.command.make_context("generate", ["--", "--branches"])
    assert context.params["text"] == "--branches"


def test_a_setting_without_a_flag_is_given_by_name() -> None:
    """Values have their types; an unknown name and one without a value are errors that say so."""
    given = settings_of(more=["max_waiting=3", "strict=true", "draft_weights=float"], port=1)
    assert (given.max_waiting, given.strict, given.draft_weights, given.port) == (
        3,
        True,
        "float",
        1,
    )
    flags = {parameter.name for parameter in serve.command.params} | {"http"}
    assert {*WITHOUT_FLAG} == {*StackSettings.__struct_fields__} - flags
    names = ("length", "temperatures")
    read = read_more(["length=48", "temperatures=0,0.7"], names)
    assert read == {"length": 48, "temperatures": [0, 0.7]}
    for wrong in ("model=x", "max_waiting", "max_waiting=many"):
        with pytest.raises(UsageError, match=wrong.partition("=")[0]):
            settings_of(more=[wrong])
    for kind, more in ((DistillSettings, distill.MORE), (ConvertSettings, convert.MORE)):
        assert set(more) <= set(kind.__struct_fields__)
