"""A model's own `generation_config.json` is used where it asks for sampling, and only there."""

import json
from pathlib import Path
from typing import Any

import pytest

from launch.api.sampling_params import SamplingParams
from launch.settings.sampling import SamplingChoice
from protocol.decoding.model_sampling import merge_options, read_model_sampling
from protocol.decoding.sampling_params import PRESETS, get_preset
from protocol.errors import ModelError, UsageError
from protocol.messages import LogitsOptions

QWEN: dict[str, Any] = {
    "do_sample": True,
    "temperature": 0.6,
    "top_p": 0.95,
    "top_k": 20,
    "repetition_penalty": 1.05,
    "eos_token_id": [1, 2],
    "transformers_version": "4.51.0",
}


def write(folder: Path, config: Any) -> str:
    """A model folder that recommends this."""
    (folder / "generation_config.json").write_text(json.dumps(config))
    return str(folder)


def choice(preset: Any = "default", **explicit: Any) -> SamplingChoice:
    """Flags as a user gives them."""
    return SamplingChoice(preset=preset, explicit=explicit, logits_options={}, seed=1)


def test_what_the_makers_recommend_is_used(tmp_path: Path, capsys: Any) -> None:
    """It is said, and flags win over it."""
    folder = write(tmp_path, QWEN)
    sampling = choice(top_p=0.5).resolve(folder)
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.6, 0.5, 20)
    assert sampling.logits_options == LogitsOptions(repetition_penalty=1.05)
    assert "as the model recommends: temperature 0.6, top-p 0.5" in capsys.readouterr().err
    assert choice().resolve(folder).top_p == 0.95
    assert SamplingParams.of_model(folder, max_tokens=7) == SamplingParams(
        temperature=0.6, top_p=0.95, top_k=20, repetition_penalty=1.05, max_tokens=7
    )


@pytest.mark.parametrize("preset", [name for name in PRESETS if name != "default"])
def test_a_preset_replaces_it(tmp_path: Path, preset: Any) -> None:
    """All of it, the penalty too."""
    sampling = choice(preset).resolve(write(tmp_path, QWEN))
    assert sampling.temperature == get_preset(preset).sampling["temperature"]
    assert sampling.logits_options is None
    assert sampling.top_k == 0


@pytest.mark.parametrize("config", [{}, {"do_sample": False, "temperature": 0.9}, {"top_k": 5}])
def test_models_that_do_not_sample_are_decoded_greedily(tmp_path: Path, config: Any) -> None:
    """As transformers does: without `do_sample` the rest has no meaning."""
    assert read_model_sampling(write(tmp_path, config)) == {}
    assert choice().resolve(str(tmp_path)).temperature == 0.0
    assert read_model_sampling(str(tmp_path / "elsewhere")) == {}
    assert read_model_sampling("") == {}


def test_sampling_alone_is_at_temperature_one(tmp_path: Path) -> None:
    """What transformers assumes; null is the same as not there."""
    config = {"do_sample": True, "temperature": None, "top_p": 0.8}
    sampling = choice().resolve(write(tmp_path, config))
    assert (sampling.temperature, sampling.top_p) == (1.0, 0.8)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"do_sample": True, "top_p": 3}, "top_p must be at most 1"),
        ({"do_sample": "yes"}, "do_sample must be true or false"),
        ([1], "must be"),
    ],
)
def test_a_recommendation_that_cannot_be_followed_is_named(
    tmp_path: Path, config: Any, reason: str
) -> None:
    """Which file, what is wrong, and the way out."""
    with pytest.raises(ModelError, match=reason) as raised:
        choice().resolve(write(tmp_path, config))
    assert "generation_config.json" in str(raised.value)
    assert "--preset" in str(raised.value)
    assert choice("greedy").resolve(str(tmp_path)).temperature == 0.0


def test_contradictions_are_found_before_anything_starts() -> None:
    """`check` needs no model."""
    with pytest.raises(UsageError, match="temperature above 0"):
        choice(draft_temperature=0.5).check()


def test_presets_differ() -> None:
    """Each is another way to answer; the conservative one has short drafts."""
    values = [get_preset(name) for name in PRESETS]
    assert all(values.count(value) == 1 for value in values)
    assert get_preset("conservative").max_draft_tokens > 0
    assert SamplingParams.preset("conservative").request(1, "x").max_draft_tokens == 3
    assert SamplingParams.preset("balanced").request(1, "x").max_draft_tokens == 0


def test_options_that_change_nothing_are_none() -> None:
    """Which costs the models nothing."""
    assert merge_options(None, {}) is None
    assert merge_options(LogitsOptions(), {"presence_penalty": 0.0}) is None
    base = LogitsOptions(repetition_penalty=1.1)
    assert merge_options(base, {"presence_penalty": 1.0}) == LogitsOptions(
        repetition_penalty=1.1, presence_penalty=1.0
    )
