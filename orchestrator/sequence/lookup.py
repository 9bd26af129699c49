"""A backup that costs the drafter nothing: what followed the last time, in prompt or answer."""

from orchestrator.sequence.planner import Planner
from orchestrator.sequence.speculation_cache import Draft
from protocol.decoding.logits_processor import BannedTokens
from protocol.decoding.prompt_lookup import find_continuation
from protocol.messages import Tokens


def looked_up(tokens: Tokens, plan: Planner, bans: BannedTokens) -> Draft:
    """What may follow `tokens`, the pending one included; empty where all is fixed by hand.

    What a bias rules out is not proposed; what a grammar forbids the verifier leaves out.

    Under the rejection rule these are named tokens, a function of those before them.
    """
    if plan.num_draft_tokens:
        return Draft()
    found, confidence = find_continuation(tokens, plan.depth, bans.count_allowed)
    draft = Draft()
    for token in found:
        draft.add(token, confidence)
    return draft
