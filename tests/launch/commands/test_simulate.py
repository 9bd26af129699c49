"""`ssd simulate`: files, presets and flags become scenarios; results are marked as simulated."""

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from launch.bench.scenarios import HEADLINE, presets, scenario_of
from launch.commands.simulate import command
from protocol.errors import UsageError


def ssd_simulate(*arguments: str) -> Result:
    return CliRunner().invoke(command, [*arguments, "--set", "tokens=150"], catch_exceptions=True)


def test_every_preset_is_complete() -> None:
    """Each says where its figures come from."""
    assert {"m4-ane", "h100-70b-1b", "h200-x2", "epyc-2core", "m1-pro", "m4", "m5"} <= set(
        presets()
    )
    for preset in presets():
        scenario = scenario_of(None, preset, {})
        assert preset == scenario.name
        assert re.search(r"measured|[Aa]ssumed", scenario.note), "a preset says what it rests on"
        assert "tok/s" in scenario.note or "measured" in scenario.note


def test_flags_win_over_a_file(tmp_path: Path) -> None:
    """What the file does not say has defaults, what a flag says is not taken from it."""
    file = tmp_path / "mine.toml"
    file.write_text(
        'tokens = 9\n[device]\nt_verify = "1:9,4:12"\nt_draft = 2\n[acceptance]\nalpha = 0.5\n'
    )
    scenario = scenario_of(file, None, {"alpha": 0.8, "ipc": 0.0})
    assert (scenario.name, scenario.tokens) == ("mine", 9)
    assert (scenario.acceptance.alpha, scenario.device.ipc) == (0.8, 0.0)
    assert (scenario.device.t_verify, scenario.device.t_draft) == ("1:9,4:12", 2)


@pytest.mark.parametrize(
    ("content", "word"),
    [
        ("[device]\nt_verify = 9\nt_draft = 1\n[acceptance]\nalpha = 2.0\n", "alpha"),
        ("[device]\nt_verify = 9\nt_draft = 1\nspeed = 1\n[acceptance]\nalpha = 0.5\n", "speed"),
        ("[device]\nt_verify = 9\n[acceptance]\nalpha = 0.5\n", "t_draft"),
        ("device = 3\n", "device"),
        ("[device\n", "cannot be read"),
    ],
)
def test_a_file_that_makes_no_sense(tmp_path: Path, content: str, word: str) -> None:
    """The error names the file and what is wrong with it."""
    file = tmp_path / "mine.toml"
    file.write_text(content)
    with pytest.raises(UsageError, match=word) as caught:
        scenario_of(file, None, {})
    assert "mine.toml" in str(caught.value)


def test_something_must_be_given() -> None:
    """Without times there is nothing to simulate, and the sentence says which flags to give."""
    with pytest.raises(UsageError, match="--t-verify"):
        scenario_of(None, None, {})
    with pytest.raises(UsageError, match="not both"):
        scenario_of(Path("x.toml"), "m4-ane", {})


def test_a_table_for_people() -> None:
    """Says that it is a simulation; has the plain row, the adaptive one and the one asked for."""
    done = ssd_simulate("--preset", "m4-ane", "--num-draft-tokens", "3", "--branches", "8")
    assert done.exit_code == 0, done.output
    assert HEADLINE in done.output
    for label in ("ar (plain)", "sd adaptive", "ssd adaptive", "ssd K=3 B=8"):
        assert label in done.output


@pytest.mark.parametrize(
    ("t_draft", "said"), [("3", "hidden under verifications, 1.98 times"), ("44", "will not pay")]
)
def test_the_schedule_is_said_before_it_is_simulated(t_draft: str, said: str) -> None:
    """It follows from T_d against T_v and the acceptance rate alone."""
    flags = ("--t-verify", "37", "--t-draft", t_draft, "--alpha", "0.6", "--set", "tokens=50")
    done = ssd_simulate(*flags)
    assert "expected at first: drafts" in done.output
    assert said in done.output


def test_a_sweep_marks_the_best_pair() -> None:
    """The grid has a star, and the verdict names the pair."""
    done = ssd_simulate("--t-verify", "20", "--t-draft", "2", "--alpha", ".7", "--sweep")
    assert done.exit_code == 0, done.output
    assert done.output.count("*") == 2
    assert "best fixed pair (*) K=" in done.output


def test_json_for_machines() -> None:
    """One object, marked as simulated, with all runs of a sweep."""
    flags = ("--t-verify", "1:20,4:30", "--t-draft", "2", "--alpha", ".7", "--sweep", "--json")
    done = ssd_simulate(*flags)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["simulated"] is True
    assert found["scenario"]["device"]["t_verify"] == "1:20,4:30"
    fixed = [run for run in found["runs"] if run["strategy"]["num_draft_tokens"]]
    best = max(fixed, key=lambda run: run["tok_s"])
    assert best["strategy"] == found["best_fixed"]
    adaptive = next(run for run in found["runs"] if run["label"] == "ssd adaptive")
    assert found["adaptive_over_best_fixed"] == pytest.approx(adaptive["tok_s"] / best["tok_s"])
    plain = next(run for run in found["runs"] if run["strategy"]["mode"] == "ar")
    assert found["speedup_vs_ar"] == pytest.approx(adaptive["tok_s"] / plain["tok_s"])
