"""The public Python API: load a pair once, generate many times.

>>> from ssd_decode import SamplingParams
>>> with LLM() as llm:
...     answers = llm.generate(["Why is the sky blue?", "And grass?"], SamplingParams(max_tokens=8))
...     pieces = [event.text for event in llm.stream("Hello", SamplingParams(max_tokens=4))
...               if isinstance(event, Text)]
>>> len(answers)
2
"""

from launch.api.llm import LLM, Answer
from launch.api.sampling_params import Prompt, SamplingParams
from protocol.messages import Finished, Statistics, Text

__all__ = ["LLM", "Answer", "Finished", "Prompt", "SamplingParams", "Statistics", "Text"]
