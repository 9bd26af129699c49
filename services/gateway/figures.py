"""What an answer cost: usage as OpenAI has it, timings as llama.cpp has them, and our own."""

from typing import Any

from protocol.messages import Finished, Generate, Status


def usage(finished: Finished, tokens: int) -> dict[str, Any]:
    """Token counts."""
    return {
        "prompt_tokens": finished.prompt_tokens,
        "completion_tokens": tokens,
        "total_tokens": finished.prompt_tokens + tokens,
        "prompt_tokens_details": {"cached_tokens": finished.cached_tokens},
    }


def timings(finished: Finished, tokens: int, status: Status) -> dict[str, Any]:
    """Times in ms, speeds in tokens per second; `predicted` is what was decoded."""
    s = finished.statistics
    prompt_ms = s.phase_ms.get("prefill_verifier", 0.0)
    fresh = finished.prompt_tokens - finished.cached_tokens
    drafter = next((service for service in status.services if service.role == "drafter"), None)
    return {
        "prompt_n": fresh,
        "cache_n": finished.cached_tokens,
        "prompt_ms": prompt_ms,
        "prompt_per_second": 1e3 * fresh / prompt_ms if prompt_ms else 0.0,
        "predicted_n": tokens,
        "predicted_ms": 1e3 * s.decode_s,
        "predicted_per_second": s.tok_s,
        "draft_n": s.drafted,
        "draft_n_accepted": s.accepted,
        "draft_rounds": s.rounds - s.plain_rounds,
        "draft_kind": drafter.backend if drafter and s.drafted else None,
    }


def speculation(finished: Finished, request: Generate) -> dict[str, Any]:
    """How speculation went; definitions in the README, "Statistics"."""
    s = finished.statistics
    return {
        "mode": request.mode,
        "seed": request.sampling.seed,
        "ttft_ms": s.ttft_ms,
        "rounds": s.rounds,
        "acceptance_rate": s.acceptance_rate,
        "mean_acceptance_length": s.mean_acceptance_length,
        "cache_hits": s.cache_hits,
        "cache_misses": s.cache_misses,
        "overlap_ratio": s.overlap_ratio,
        "draft_wait_ms": s.phase_ms.get("draft_wait", 0.0),
        "verify_ms": s.phase_ms.get("verify", 0.0),
        "fallbacks": s.fallbacks,
        "predicted_tok_s": s.predicted_tok_s,
        "plain_tok_s": s.plain_tok_s,
    }
