"""The former name of `ssd_decode`."""

import warnings

from ssd_decode import LLM, Answer, Finished, Prompt, SamplingParams, Statistics, Text

__all__ = ["LLM", "Answer", "Finished", "Prompt", "SamplingParams", "Statistics", "Text"]

warnings.warn(
    "mlx_ssd is now called ssd_decode: `from ssd_decode import LLM`",
    DeprecationWarning,
    stacklevel=2,
)
