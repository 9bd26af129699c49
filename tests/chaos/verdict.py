"""Which changed answers are rounding ties: two tokens whose scores are equal but for rounding.

A sequence that is opened anew after a fault gets its KV from one pass over all of its tokens,
not from one pass for each; the last bits may differ, and with them which of two equal tokens
is chosen. As in `ssd bench`, that is measured by the reference process, and counted apart.
"""

from dataclasses import dataclass
from pathlib import Path

from launch.models.pair import Pair
from launch.workers.reference import ReferenceWorker
from orchestrator.text.tokenizer import TargetTokenizer
from tests.chaos.load import Difference


@dataclass(frozen=True)
class Verdict:
    """One way in which answers changed."""

    question: str
    temperature: float
    mode: str
    position: int
    """Of the first other token; -1 if one answer is the beginning of the other."""
    margin: float | None
    """In logits, between that token and the expected one."""
    tie: bool


def judge(differences: list[Difference], pair: Pair) -> list[Verdict]:
    """One verdict for each difference."""
    if not differences:
        return []
    tokenizer = TargetTokenizer(Path(pair.model))
    with ReferenceWorker(pair) as reference:
        return [_judge(difference, tokenizer, reference) for difference in differences]


def _judge(
    difference: Difference, tokenizer: TargetTokenizer, reference: ReferenceWorker
) -> Verdict:
    request = difference.request
    # A negative one stands for a cancellation: the answer is the beginning of the expected one.
    tokens = [token for token in difference.tokens if token >= 0]
    prompt = tokenizer.encode(request.messages)
    at, found = reference.parting(prompt, difference.expected, tokens, request.sampling)
    return Verdict(
        question=request.messages[0].content,
        temperature=request.sampling.temperature,
        mode=request.mode,
        position=at,
        margin=None if found is None else found.margin,
        tie=found is not None and found.is_tie,
    )
