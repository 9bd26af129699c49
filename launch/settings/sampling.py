"""The user's sampling: flags override a preset, which overrides the model's recommendation."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from launch.terminal import console
from launch.terminal.generate import new_seed
from protocol.decoding.grammar import check_grammar, json_grammar
from protocol.decoding.model_sampling import merge_options, read_model_sampling
from protocol.decoding.sampling_params import PresetName, check_sampling, fit_filters, get_preset
from protocol.errors import UsageError
from protocol.messages import Sampling


@dataclass(frozen=True)
class SamplingChoice:
    """The sampling options, before the model is known."""

    preset: PresetName
    explicit: dict[str, Any]
    """Explicit fields of `Sampling`."""
    logits_options: dict[str, Any]
    seed: int | None

    def resolve(self, model: str = "") -> Sampling:
        """Return the parameters for the model in this folder; a random seed is reported.

        Raises:
            UsageError: they contradict each other.
            ModelError: the model's recommendation cannot be used.
        """
        recommended = read_model_sampling(model) if self.preset == "default" else {}
        sampling = self._merge(recommended)
        if recommended:
            console.note(
                f"sampled as the model recommends: temperature {sampling.temperature:g}, "
                f"top-p {sampling.top_p:g}, top-k {sampling.top_k} (--preset greedy for none)"
            )
        if self.seed is None and sampling.temperature:
            console.note(f"seed {sampling.seed}")
        return sampling

    @property
    def max_draft_tokens(self) -> int:
        """Limit on the planner's draft tokens per round; 0 is unlimited."""
        return get_preset(self.preset).max_draft_tokens

    def check(self) -> None:
        """Raise UsageError on contradictory flags, before anything is started."""
        self._merge({})

    def _merge(self, recommended: dict[str, Any]) -> Sampling:
        base = dict(recommended)
        options = merge_options(base.pop("logits_options", None), self.logits_options)
        merged = {**base, **get_preset(self.preset).sampling, **self.explicit}
        seed = new_seed() if self.seed is None else self.seed
        sampling = Sampling(**merged, seed=seed, logits_options=options)
        check_sampling(sampling)
        return sampling


def take_sampling_choice(options: dict[str, Any]) -> SamplingChoice:
    """Take the sampling options out of `options`; raise UsageError if one is invalid."""
    seed = options.pop("seed")
    explicit = {
        "temperature": options.pop("temp"),
        "top_p": options.pop("top_p"),
        "top_k": options.pop("top_k"),
        "min_p": options.pop("min_p"),
        "acceptance": options.pop("acceptance"),
        "saguaro": options.pop("saguaro_c"),
    }
    return SamplingChoice(
        preset=options.pop("preset"),
        explicit=fit_filters(
            {name: value for name, value in explicit.items() if value is not None}
        ),
        logits_options=_take_logits_options(options),
        seed=None if seed == -1 else seed,
    )


def take_sampling(options: dict[str, Any]) -> Sampling:
    """Take the sampling options for measurements, which ignore the model's recommendation."""
    return take_sampling_choice(options).resolve()


def _take_logits_options(flags: dict[str, Any]) -> dict[str, Any]:
    names = ("repetition_penalty", "presence_penalty", "frequency_penalty")
    penalties = {name: flags.pop(name) for name in names}
    schema: Path | None = flags.pop("json_schema")
    options = {name: value for name, value in penalties.items() if value is not None}
    if options.get("repetition_penalty") == 0:
        options["repetition_penalty"] = 1.0  # off, as in mlx-lm
    if schema is not None:
        options["grammar"] = json_grammar(_read_schema(schema))
        check_grammar(options["grammar"])
    return options


def _read_schema(path: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError) as error:
        raise UsageError(f"{str(path)!r} is not a JSON schema: {error}") from error
