"""`ssd models`: what is here, what fits what, what can be had, and what would be worth having."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from huggingface_hub import constants

from launch.cli import cli
from launch.models.catalog import Model, pairs
from launch.models.deviations import describe_inexact, read_deviations
from launch.models.hub import resolve
from launch.models.recommendation import (
    PURPOSES,
    describe_schedule,
    plan_by_weights,
    read_pairs,
    recommend,
)
from orchestrator.learning.schedule import tokens_per_round
from protocol.errors import ModelError, UsageError
from tests.support.hub import SHA, Hub, serving
from tests.support.tiny_models import write_tiny_model

USAGE, MODEL, RUNTIME = 2, 3, 4


def ssd(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["models", *arguments])


def said(*arguments: str) -> Any:
    """What a verb says as JSON."""
    result = ssd(*arguments, "--json")
    assert result.exception is None, result.exception
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model", "llama", seed=1)


@pytest.fixture
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two empty caches: `ssd/models` and `hub`."""
    monkeypatch.setenv("SSD_CACHE_DIR", str(tmp_path / "ssd"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "ssd" / "models").mkdir(parents=True)
    return tmp_path


def in_hub_cache(caches: Path, folder: Path, name: str) -> None:
    """Put a model where the hub's client would."""
    home = caches / "hub" / f"models--{name.replace('/', '--')}"
    shutil.copytree(folder, home / "snapshots" / SHA)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text(SHA)


def test_both_caches_are_listed(caches: Path, tiny: Path) -> None:
    """Our own models and the hub's, with what their files say."""
    shutil.copytree(tiny, caches / "ssd" / "models" / "ours")
    in_hub_cache(caches, tiny, "tests/theirs")
    ours, theirs = said("list")["models"]
    assert (ours["source"], ours["name"]) == ("ssd", "ours")
    assert (theirs["source"], theirs["name"]) == ("hub", "tests/theirs")
    weights = (tiny / "model.safetensors").stat().st_size
    for model in (ours, theirs):
        assert model["architecture"] == "llama"
        assert model["parameters"] > 1000
        assert weights - 10_000 < model["weight_bytes"] < weights < model["disk_bytes"]
        assert model["vocabulary"] == ours["vocabulary"] != ""
        assert model["problem"] == ""
    printed = ssd("list").stdout
    assert "tests/theirs" in printed
    assert "llama" in printed


def test_half_a_model_does_not_hide_the_others(caches: Path, tiny: Path) -> None:
    """What cannot be used is listed with its reason."""
    shutil.copytree(tiny, caches / "ssd" / "models" / "whole")
    shutil.copytree(tiny, caches / "ssd" / "models" / "broken")
    (caches / "ssd" / "models" / "broken" / "model.safetensors").write_bytes(b"\x08")
    shutil.copytree(tiny, caches / "ssd" / "models" / "mute")
    (caches / "ssd" / "models" / "mute" / "tokenizer.json").unlink()
    found = {m["name"]: m["problem"] for m in said("list")["models"]}
    assert found["whole"] == ""
    assert "cannot read the model folder" in found["broken"]
    assert "no tokenizer.json" in found["mute"]
    assert "no tokenizer.json" in ssd("list").stderr


def test_no_models_yet(caches: Path) -> None:
    """An empty machine is told how to begin; a missing hub cache is no error."""
    assert said("list") == {"models": [], "pairs": []}
    assert "ssd models add default" in ssd("list").stdout


def model(name: str, parameters: int, vocabulary: str = "v", **more: Any) -> Model:
    return Model(
        name=name, folder="", source="ssd", disk_bytes=0, parameters=parameters,
        vocabulary=vocabulary, **more,
    )  # fmt: skip


def test_pairs_share_a_tokenizer_and_differ_in_size() -> None:
    """Half the size at most; other tokens, half a model, or a cut head as target never."""
    models = [
        model("large", 100),
        model("small", 20),
        model("middle", 60),
        model("stranger", 10, "w"),
        model("head", 10, only_drafts=True),
        model("broken", 10, problem="no"),
        model("mite", 4),
        model("unread", 0),
    ]
    found = {(fit.model, fit.draft_model): fit.ratio for fit in pairs(models)}
    assert found == {
        ("large", "head"): 0.1,
        ("large", "mite"): 0.04,
        ("large", "small"): 0.2,
        ("middle", "head"): 10 / 60,
        ("middle", "mite"): 4 / 60,
        ("middle", "small"): 20 / 60,
        ("small", "head"): 0.5,
        ("small", "mite"): 0.2,
    }


@pytest.mark.usefixtures("layers_in_process")
@pytest.mark.parametrize("family", ["llama", "quantized"])
def test_inspect(tmp_path: Path, family: str) -> None:
    """Architecture, parameters, context, vocabulary, quantisation, memory."""
    folder = write_tiny_model(tmp_path / "m", family, seed=1)
    config = json.loads((folder / "config.json").read_text())
    found = said("inspect", str(folder))
    assert found["context_length"] == config.get("max_position_embeddings", 0)
    assert bool(found["quantization"]) == (family == "quantized")
    assert found["vocabulary_size"] > 10
    printed = ssd("inspect", str(folder)).stdout
    kv = found["kv_bytes_per_token"] / 1e3  # a float16 has two bytes on both
    memory = f"{kv:.1f} kB a token on a GPU, {kv:.1f} kB on a CPU"
    for word in (found["vocabulary"], memory, found["quantization"] or "none"):
        assert word in printed


@pytest.mark.usefixtures("layers_in_process")
def test_inspect_finds_models_of_the_caches(caches: Path, tiny: Path) -> None:
    """By the name that `list` shows; --model takes the same."""
    in_hub_cache(caches, tiny, "tests/theirs")
    shutil.copytree(tiny, caches / "ssd" / "models" / "ours")
    assert said("inspect", "tests/theirs")["source"] == "hub"
    assert said("inspect", "ours")["source"] == "ssd"
    assert resolve("ours") == (caches / "ssd" / "models" / "ours").resolve()


def test_inspect_what_is_not_here(caches: Path, tmp_path: Path) -> None:
    """It is said where to look, and nothing is downloaded."""
    result = ssd("inspect", "tests/nobody")
    assert isinstance(result.exception, UsageError)
    assert "ssd models pull" in str(result.exception)
    (tmp_path / "empty").mkdir()
    result = ssd("inspect", str(tmp_path / "empty"))
    assert isinstance(result.exception, ModelError)
    assert "no config.json" in str(result.exception)


# ---------------------------------------------------------------- pull, by the real client


@pytest.fixture
def hub(tiny: Path, tmp_path: Path) -> Iterator[Hub]:
    """A hub that offers a tiny model, and a file that no decoder needs."""
    folder = tmp_path / "offered"
    shutil.copytree(tiny, folder)
    (folder / "pytorch_model.bin").write_bytes(b"x" * 100)
    with serving(folder) as made:
        yield made


def pull(hub: Hub, home: Path, name: str, **more: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "HF_HOME": str(home),
        "HF_ENDPOINT": hub.endpoint,
        "HF_HUB_DISABLE_XET": "1",
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
        **more,
    }
    command = [sys.executable, "-m", "launch.cli", "models", "pull", name, "--json"]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, env=environment
    )


@pytest.mark.processes
def test_pull_fetches_what_a_model_needs_once(hub: Hub, tmp_path: Path) -> None:
    """Weights, configuration and tokenizer, nothing else; a second time needs no hub."""
    done = pull(hub, tmp_path / "home", "tests/tiny")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["architecture"] == "llama"
    assert Path(found["folder"]).is_relative_to(tmp_path / "home")
    assert sorted(hub.fetched) == sorted(set(hub.fetched))
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= set(hub.fetched)
    assert "pytorch_model.bin" not in hub.fetched
    again = pull(hub, tmp_path / "home", "tests/tiny", HF_HUB_OFFLINE="1")
    assert (again.returncode, again.stdout) == (0, done.stdout)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "status", "environment", "outcome"),
    [
        ("tests/nobody", 0, {}, (MODEL, "no model 'tests/nobody', or it is private")),
        ("tests/tiny", 403, {}, (MODEL, "accept its terms")),
        ("tests/tiny", 0, {"HF_HUB_OFFLINE": "1"}, (RUNTIME, "HF_HUB_OFFLINE forbids")),
        ("tests/tiny", 0, {"HF_ENDPOINT": "http://127.0.0.1:9"}, (RUNTIME, "hub reachable")),
        ("tiny", 0, {}, (USAGE, "OWNER/NAME")),
        ("tests/ti ny!", 0, {}, (USAGE, "ti ny!")),
    ],
)
def test_pull_says_what_is_in_the_way(  # noqa: PLR0917  # a row of the table above
    hub: Hub, tmp_path: Path, name: str, status: int, environment: dict[str, str],
    outcome: tuple[int, str],
) -> None:  # fmt: skip
    """An unknown name, terms, no permission to ask, no network, no name at all."""
    hub.status = status
    done = pull(hub, tmp_path / "home", name, **environment)
    assert done.returncode == outcome[0], done.stderr
    assert outcome[1] in done.stderr
    assert "Traceback" not in done.stderr


# ---------------------------------------------------------------- conversions


def test_what_a_conversion_changed_is_described(tmp_path: Path) -> None:
    """Which layers of a GGUF file are not held exactly, and how far they are off."""
    assert read_deviations(tmp_path) == []
    names = ["lm_head", "model.layers.0.mlp.down_proj", "model.layers.12.mlp.down_proj"]
    layers = [
        {"name": f"{name}.weight", "largest": 0.001 * (number + 1), "relative": 0.004}
        for number, name in enumerate(names)
    ]
    exact = {"tensors": 9, "parameters": 9, "layers": []}
    off = {"tensors": 3, "parameters": 3, "layers": layers}
    report = {"source": "x.gguf", "types": {"Q4_K": exact, "Q6_K": off}}
    (tmp_path / "gguf.json").write_text(json.dumps(report))
    (found,) = read_deviations(tmp_path)
    assert describe_inexact(found) == (
        "3 tensors of Q6_K, off by up to 0.40% (root mean square), a weight by 0.003 at most: "
        "lm_head; mlp.down_proj of layers 0, 12"
    )
    (tmp_path / "gguf.json").write_text('{"types": []}')
    with pytest.raises(ModelError, match=r"cannot read gguf\.json"):
        read_deviations(tmp_path)


# ---------------------------------------------------------------- recommend


def test_every_pair_of_the_file_is_sound() -> None:
    """Drafters are smaller, names are names, and each purpose and family has a pair."""
    entries = read_pairs()
    assert len({(e.model, e.draft_model) for e in entries}) == len(entries)
    for entry in entries:
        assert 3 * entry.draft_parameters < 1.2 * entry.parameters
        assert entry.model in {"default", "coder"} or entry.model.count("/") == 1
    assert set(PURPOSES) == {purpose for entry in entries for purpose in entry.purposes}
    families = {"Llama 3", "Qwen 2.5", "Qwen 3", "Qwen 3.5", "SmolLM2"}
    assert families == {entry.family for entry in entries}


def test_published_heads_are_named_with_their_licence() -> None:
    """A head of each format that has one, marked as such; models have no licence to name. It is
    said that nobody checked it."""
    entries = read_pairs()
    assert {"eagle3", "mtp", "dflash", "dspark"} <= {entry.head for entry in entries}
    assert all(bool(entry.head) == bool(entry.licence) for entry in entries)
    shown = [r for r in recommend(10**12) if r.head]
    assert all(r.licence and r.command.startswith("ssd launch --model") for r in shown)
    same = {r.head: r for r in recommend(10**12) if r.model == "mlx-community/Qwen3-8B-4bit"}
    weights = (8.19 * 4.5 + 1.05 * 16) * 1e9 / 8
    assert 1.1 * weights < same["dflash"].memory_bytes < 1.1 * weights + 2e9


def test_the_largest_that_fits_comes_first() -> None:
    """Then smaller ones, then what does not fit, marked."""
    found = recommend(16 * 10**9, "chat")
    fitting = [r.memory_bytes for r in found if r.fits]
    beyond = [r.memory_bytes for r in found if not r.fits]
    assert [r.fits for r in found] == [True] * len(fitting) + [False] * len(beyond)
    assert fitting == sorted(fitting, reverse=True)
    assert max(fitting) <= 12 * 10**9 < min(beyond)
    assert all("chat" in r.purposes for r in found)
    assert not any(r.fits for r in recommend(10**8))


def test_a_cpu_is_given_what_it_can_decode() -> None:
    """Weights keep their bits there, and a large target is too slow whatever memory there is."""
    on_gpu = {r.model: r for r in recommend(10**12)}
    on_cpu = {r.model: r for r in recommend(10**12, cpu_cores=2)}
    assert all(r.fits for r in on_gpu.values())
    assert on_cpu["default"].fits
    assert on_cpu["default"].plain_tok_s > 10
    large = on_cpu["mlx-community/Llama-3.3-70B-Instruct-4bit"]
    assert not large.fits
    assert large.memory_bytes < 1.2 * on_gpu[large.model].memory_bytes
    floats = on_cpu["Qwen/Qwen3.5-9B"]  # this architecture is computed in float32
    assert floats.memory_bytes > 1.9 * on_gpu[floats.model].memory_bytes


def test_three_billion_parameters_of_four_bits_fit_into_17_gb() -> None:
    """On a CPU too: about 2 GB of weights, some KV, two processes."""
    for cores in (0, 2):
        found = {r.model: r for r in recommend(17 * 10**9, cpu_cores=cores)}
        for model in ("Llama-3.2-3B-Instruct-4bit", "Qwen2.5-3B-Instruct-4bit", "Qwen3-4B-4bit"):
            pair = found[f"mlx-community/{model}"]
            assert pair.fits, (model, cores)
            assert 2 * 10**9 < pair.memory_bytes < 9 * 10**9, (model, cores)


def test_what_was_measured_is_marked() -> None:
    """A pair with measurements says where they are, and how it is set up."""
    (coder,) = (r for r in recommend(10**12) if r.model == "coder")
    assert coder.measured
    assert coder.command == "ssd models add coder"
    printed = ssd("recommend", "--memory", "64", "--purpose", "code").stdout
    assert "coder (measured)" in printed
    assert "Qwen2.5-Coder-7B-Instruct-4bit (measured)" not in printed


def test_expectations() -> None:
    """Tokens per round follow from the assumed acceptance: 1 + a + a^2 + a^3 + a^4."""
    assert tokens_per_round(0.5, 4) == 1 + 0.5 + 0.25 + 0.125 + 0.0625
    assert tokens_per_round(0.75, 1) == 1.75


def test_a_schedule_follows_from_what_a_drafted_token_costs() -> None:
    """It is the planner's own, with rows that cost something."""
    in_turn = plan_by_weights(0.3, 0.8, shares=True)
    assert (in_turn.way, in_turn.draft_tokens) == ("in turn", 2)
    assert in_turn.gain == pytest.approx(tokens_per_round(0.8, 2) / (1.3 + 0.6))
    assert "in turn, 1.28 times" in describe_schedule(in_turn, shares=True)
    hidden = plan_by_weights(0.1, 0.8, shares=False)
    assert hidden.way == "in parallel"
    assert hidden.gain > plan_by_weights(0.1, 0.8, shares=True).gain
    assert "hidden under verifications" in describe_schedule(hidden, shares=False)
    dear = plan_by_weights(1.0, 0.8, shares=False)
    assert dear.way == "plain"
    assert "will not pay" in describe_schedule(dear, shares=True)
    assert all(
        bool(r.schedule) == (cores > 0)
        for cores in (0, 2)
        for r in recommend(10**12, cpu_cores=cores)
    )


def test_recommendations_are_marked_as_expectations() -> None:
    """Nobody takes an assumption for a measurement."""
    found = said("recommend", "--memory", "64", "--purpose", "code")
    assert found["memory_bytes"] == 64 * 10**9
    assert all("code" in pair["purposes"] for pair in found["pairs"])
    printed = ssd("recommend", "--memory", "64").stdout
    assert "Expected, not measured" in printed
    assert "assumed" in printed
    assert "not checked; see the model's card" in " ".join(printed.split())


# ---------------------------------------------------------------- own models: names, removal


def test_a_folder_gets_a_name_and_loses_it(caches: Path, tiny: Path) -> None:
    """`add` names a folder for --model, `rm` removes the name and not the folder."""
    assert ssd("add", str(tiny), "--name", "mine").exit_code == 0
    assert resolve("mine") == tiny.resolve()
    again = ssd("add", str(tiny), "--name", "mine")
    assert "there is a model 'mine' already" in str(again.exception)
    assert ssd("rm", "mine", "--yes").exit_code == 0
    assert (tiny / "config.json").is_file()
    assert not (caches / "ssd" / "models" / "mine").exists()


def test_what_cannot_be_named(caches: Path, tiny: Path, tmp_path: Path) -> None:
    """A folder without a model, a name that is a path or `default`, and what is no folder."""
    (tmp_path / "empty").mkdir()
    for arguments, kind, words in (
        ((str(tmp_path / "empty"),), ModelError, "no config.json"),
        ((str(tiny), "--name", "../mine"), UsageError, "cannot name a model"),
        ((str(tiny), "--name", "default"), UsageError, "cannot name a model"),
        (("no-such-folder",), UsageError, "nor a model folder or a GGUF file"),
    ):
        result = ssd("add", *arguments)
        assert isinstance(result.exception, kind)
        assert words in str(result.exception)


@pytest.mark.parametrize("name", ["nobody", "..", ".", "a/b"])
def test_only_own_models_are_removed(caches: Path, name: str) -> None:
    """Nothing outside our cache, and not our cache itself."""
    (caches / "ssd" / "models").mkdir(parents=True, exist_ok=True)
    for confirmed in (["--yes"], []):  # nothing is asked about what is not there
        result = ssd("rm", name, *confirmed)
        assert isinstance(result.exception, UsageError)
    assert (caches / "ssd" / "models").is_dir()


def test_default_is_a_name_of_both_models(caches: Path) -> None:
    """Before it is set up, the error says how."""
    with pytest.raises(ModelError, match="ssd models add default"):
        resolve("default")
