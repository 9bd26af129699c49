"""Explain the choices made for an answer in sentences that a user understands."""

from launch.models.recommendation import say_schedule
from launch.terminal.statistics import describe_age, is_comparable
from protocol.messages import Mode, Statistics

_MOSTLY = 0.5
_BASELINE_ROUNDS = 8
"""Up to this many plain rounds may only have measured plain decoding."""


def explanation(mode: Mode, s: Statistics) -> str:
    """Return a short paragraph about a finished answer."""
    if mode == "ar":
        return f"Plain decoding, as asked: {_plural(s.rounds, 'verification')} of one token each."
    layers = f"The target's layers: {s.rewinding}." if s.rewinding else ""
    undrafted = s.fallbacks.get("no_drafter", 0)
    if undrafted > _MOSTLY * s.rounds:
        text = "There was no drafter for most of the answer, so the target decoded plainly."
        return " ".join(filter(None, [text + _describe_lookups(s), layers]))
    sentences = [_describe_plan(s), _what(s), _why(s), _how_well(s), layers]
    return " ".join(filter(None, sentences))


def _describe_plan(s: Statistics) -> str:
    """Describe what the planner expected before the first round, and why."""
    if (planned := s.planned) is None:
        return "Nothing was planned: passes had not been timed." if s.drafter else ""
    passes = ", ".join(f"{rows}: {ms:.1f}" for rows, ms in planned.pass_ms.items())
    reasons = f"passes by their tokens {passes} ms, a drafted token {planned.draft_ms:.1f}"
    return f"Planned: {say_schedule(planned)} ({reasons}, acceptance {planned.acceptance:.2f})."


def _what(s: Statistics) -> str:
    if s.plain_rounds >= s.rounds:
        return "All rounds were plain decoding."
    with_draft = (s.offered_per_position or [0])[0]
    if not with_draft:
        text = f"No draft was verified in {_plural(s.rounds, 'round')}"
        if skipped := s.fallbacks.get("plain", 0):
            text += f": in {skipped} of them none was ready or worth waiting for"
        return text + "."
    text = (
        f"{with_draft} of {s.rounds} rounds verified a draft: {s.drafted / with_draft:.1f} tokens "
        f"on average, of which {s.accepted / with_draft:.1f} were accepted"
    )
    if s.cache_hits + s.cache_misses:
        text += (
            f". In {s.hit_rate:.0%} of the rounds with a prepared tree the next draft was ready in "
            "time"
        )
    return text + "." + _describe_trees(s) + _describe_lookups(s)


def _describe_trees(s: Statistics) -> str:
    if not s.tree_rounds:
        return ""
    return (
        f" In {_plural(s.tree_rounds, 'round')} the draft was a tree: "
        f"{_plural(s.branch_tokens, 'token')} came from side branches."
    )


def _describe_lookups(s: Statistics) -> str:
    kind = s.by_origin.get("lookup")
    if kind is None:
        return ""
    return (
        f" In {_plural(kind.rounds, 'round')} the draft was looked up in prompt and answer: "
        f"{kind.accepted} of {_plural(kind.drafted, 'token')} accepted."
    )


def _plural(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _why(s: Statistics) -> str:
    if s.plain_rounds > _BASELINE_ROUNDS:
        return (
            "On this text a draft was not worth its verification for a while, so "
            f"{s.plain_rounds} rounds went without one."
        )
    if s.plain_rounds:
        return f"{_plural(s.plain_rounds, 'plain round')} measured what speculation has to beat."
    return ""


def _how_well(s: Statistics) -> str:
    parts = [f"measured {s.tok_s:.1f} tok/s"]
    if is_comparable(s):
        age = describe_age(s.plain_age_s)
        parts.append(f"plain decoding {s.plain_tok_s:.1f} (measured {age})")
    text = ", ".join(parts) + "."
    return text[0].upper() + text[1:]
