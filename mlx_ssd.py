"""The public Python API: load a pair once, generate many times.

from mlx_ssd import LLM, SamplingParams

with LLM() as llm:
    for answer in llm.generate(["Why is the sky blue?"], SamplingParams(max_tokens=64)):
        print(answer.text)
"""

from launch.api import LLM, Answer, SamplingParams

__all__ = ["LLM", "Answer", "SamplingParams"]
