"""`SamplingParams`: decoding parameters for Python programs."""

from collections.abc import Mapping, Sequence
from typing import Any, Self

import msgspec

from launch.terminal.generate import new_seed
from protocol.decoding.grammar import check_grammar, json_grammar
from protocol.decoding.model_sampling import read_model_sampling
from protocol.decoding.sampling_params import (
    PRESETS,
    PresetName,
    check_sampling,
    fit_filters,
    get_preset,
)
from protocol.errors import UsageError
from protocol.messages import Acceptance, ChatMessage, Generate, LogitsOptions, Mode
from protocol.validation import describe

Prompt = str | Sequence[Mapping[str, str]]
"""A text, or a conversation: messages with `role` and `content`."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How to answer; the names are those of the command line. Temperature 0 is greedy.

    >>> SamplingParams(temperature=0.8, top_p=0.95, seed=7, max_tokens=128).seed
    7
    >>> SamplingParams.preset("creative", max_tokens=128).temperature
    1.0
    >>> schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    >>> SamplingParams(json_schema=schema).request(1, "Count.").sampling.logits_options.grammar[:12]
    'start: %json'
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    """None or -1 chooses a random one; under the coupled rule, a seed gives the same answer in
    every mode.
    """
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    mode: Mode = "ssd"
    num_draft_tokens: int = 0
    """Draft tokens per round; 0: the planner decides."""
    max_draft_tokens: int = 0
    """Limit on the planner's choice; 0 is unlimited."""
    acceptance: Acceptance = "coupled"
    """coupled: the tokens of plain decoding; rejection: their distribution."""
    draft_temp: float | None = None
    """Temperature of the drafter; None: the target's."""
    draft_top_p: float | None = None
    saguaro_c: float = 1.0
    """Rejection: the draft's weight for tokens whose outcomes are prepared; 1 is off."""
    repetition_penalty: float = 1.0
    """Divides the positive logits of tokens that occurred, multiplies their negative ones."""
    presence_penalty: float = 0.0
    """Subtracted once from the logits of the answer's tokens."""
    frequency_penalty: float = 0.0
    """Subtracted from the logits of the answer's tokens, once per occurrence."""
    logit_bias: Mapping[int, float] = {}
    """Token id -> value added to its logit."""
    json_schema: Mapping[str, Any] | None = None
    """The answer will be JSON that follows this schema."""
    logprobs: int | None = None
    """Report each token's log-probability, and those of this many best ones."""

    def __post_init__(self) -> None:
        """Raise UsageError, naming the parameter, if a value is invalid."""
        self.request(1, "")

    @classmethod
    def preset(cls, name: PresetName, **others: Any) -> Self:
        """Return parameters for a purpose: default, greedy, balanced, creative or conservative."""
        if name not in PRESETS:
            raise UsageError(f"there is no preset {name!r}; known: {', '.join(PRESETS)}")
        preset = get_preset(name)
        values = {"max_draft_tokens": preset.max_draft_tokens, **preset.sampling}
        return cls(**{**values, **others})

    @classmethod
    def of_model(cls, folder: str, **others: Any) -> Self:
        """Return the recommended parameters of the model in this folder; greedy without any."""
        values = read_model_sampling(folder)
        options: LogitsOptions | None = values.pop("logits_options", None)
        if options is not None:
            values["repetition_penalty"] = options.repetition_penalty
        return cls(**{**values, **others})

    def request(self, number: int, prompt: Prompt) -> Generate:
        """The orchestrator's request for one prompt; raises UsageError if a value is invalid."""
        turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        try:
            messages = msgspec.convert([dict(turn) for turn in turns], list[ChatMessage])
            request = msgspec.convert(
                {
                    "type": "generate",
                    "request": number,
                    "messages": msgspec.to_builtins(messages),
                    "sampling": self._sampling(),
                    "max_tokens": self.max_tokens,
                    "stop": list(self.stop),
                    "mode": self.mode,
                    "num_draft_tokens": self.num_draft_tokens,
                    "max_draft_tokens": self.max_draft_tokens,
                },
                Generate,
            )
        except msgspec.ValidationError as error:
            raise UsageError(f"SamplingParams: {_describe(error)}") from error
        check_sampling(request.sampling)
        if self.json_schema is not None:
            check_grammar(json_grammar(self.json_schema))
        return request

    def _sampling(self) -> dict[str, Any]:
        return fit_filters({
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "seed": new_seed() if self.seed in (None, -1) else self.seed,
            "acceptance": self.acceptance,
            "draft_temperature": self.draft_temp,
            "draft_top_p": self.draft_top_p,
            "saguaro": self.saguaro_c,
            "logits_options": self._shape(),
            "logprobs": self.logprobs,
        })  # fmt: skip

    def _shape(self) -> dict[str, Any] | None:
        processing = {
            "repetition_penalty": self.repetition_penalty,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "logit_bias": tuple(sorted(self.logit_bias.items())),
            "grammar": "" if self.json_schema is None else json_grammar(self.json_schema),
        }
        # Without a wish nothing is shaped, which costs the models nothing.
        return processing if msgspec.convert(processing, LogitsOptions) != LogitsOptions() else None


_NAMES = {"draft_temperature": "draft_temp", "saguaro": "saguaro_c"}
"""Parameters that the request has under another name."""


def _describe(error: msgspec.ValidationError) -> str:
    sentence = describe(error).removeprefix("sampling.").removeprefix("logits_options.")
    name, space, rest = sentence.partition(" ")
    return f"{_NAMES.get(name, name)}{space}{rest}"
