"""`ssd bench --only profile`: the expected gain of this machine and pair, and the best settings.

T_v(m) and T_d(B) are measured by profilers; a few short answers of a stack give the cost of a
message and the quality of the drafter. The product's own decisions are then simulated with these
figures (`orchestrator/simulation`), adaptively and for a grid of fixed settings.
"""

from collections.abc import Callable
from statistics import median

from launch.bench.result import Profile, SpeedPrediction
from launch.prompts import Prompt
from orchestrator.simulation.run import simulate
from orchestrator.simulation.scenario import AcceptanceModel, Device, Scenario, Strategy
from orchestrator.simulation.sweep import compare, strategy_grid
from protocol.client.client import Client
from protocol.messages import ChatMessage, Finished, Generate, Statistics

_ANSWERS = 4
_TOKENS = 64
_SIMULATED_TOKENS = 600
_BISECTIONS = 6
_DRAFT_LENGTHS = (1, 2, 3, 4, 6)
_BUDGETS = (8, 16, 32)
_NUM_DRAFT_TOKENS = 4
"""Draft tokens of the sample answers: fixed, so that acceptance at every position is seen."""
_CLOSE = 1.02
"""A mode that is not faster by this factor than a simpler one is not worth its processes."""


def sample(client: Client, prompts: list[Prompt]) -> list[Statistics]:
    """Decode a few short answers to prompts spread over the list, which may be sorted by
    category.
    """
    collected = []
    for prompt in prompts[:: max(1, len(prompts) // _ANSWERS)][:_ANSWERS]:
        request = Generate(
            request=client.number(),
            messages=[ChatMessage("user", prompt.prompt)],
            max_tokens=_TOKENS,
            num_draft_tokens=_NUM_DRAFT_TOKENS,
        )
        collected += [m.statistics for m in client.generate(request) if isinstance(m, Finished)]
    return collected


def profile(
    verify_ms: dict[str, float],
    draft_ms: dict[str, float],
    answers: list[Statistics],
    progress: Callable[[str], None],
) -> Profile:
    """Return the figures, and the simulator's results from them."""
    offered = sum(s.rounds * rate for s in answers for rate in _rates_of_reaching(s))
    accepted = sum(s.accepted for s in answers)
    alpha = min(0.99, accepted / offered) if offered else 0.0
    idle = [s.phase_ms["idle_hit"] for s in answers if "idle_hit" in s.phase_ms]
    # A round with a hit waits for two messages: the outcome, and the next verification.
    ipc_ms = median(idle) / 2 if idle else Device(t_verify=1.0, t_draft=1.0).ipc
    contention = _contention(verify_ms, answers)
    prediction = None
    if draft_ms and alpha:
        device = Device(
            t_verify=_curve(verify_ms),
            t_draft=_curve(draft_ms),
            ipc=ipc_ms,
            contention=contention,
        )
        scenario = _calibrate(device, alpha, answers)
        prediction = _predict(scenario, progress)
    return Profile(
        verify_ms=verify_ms,
        draft_ms=draft_ms,
        ipc_ms=ipc_ms,
        contention=contention,
        acceptance_rate=alpha,
        prediction=prediction,
    )


def _contention(verify_ms: dict[str, float], answers: list[Statistics]) -> float:
    """Return the relative slowdown of a verification while the drafter works."""
    name = str(_NUM_DRAFT_TOKENS + 1)
    contended_ms = [s.phase_ms[f"verify_{name}"] for s in answers if f"verify_{name}" in s.phase_ms]
    if not contended_ms or name not in verify_ms:
        return 0.0
    return max(0.0, median(contended_ms) / verify_ms[name] - 1.0)


def _calibrate(device: Device, alpha: float, answers: list[Statistics]) -> Scenario:
    """Find a scenario with the measured hit rate by bisection."""
    looked_up = sum(kind.cache_lookups for s in answers for kind in s.by_origin.values())
    hits = sum(kind.cache_hits for s in answers for kind in s.by_origin.values())
    low, high = 0.02, 0.98

    def scenario(first: float, tokens: int) -> Scenario:
        model = AcceptanceModel(alpha=alpha, first=first)
        return Scenario(
            name="this machine and pair", device=device, acceptance=model, tokens=tokens
        )

    strategy = Strategy(num_draft_tokens=_NUM_DRAFT_TOKENS)
    for _ in range(_BISECTIONS if looked_up else 0):
        middle = (low + high) / 2
        run = simulate(scenario(middle, _SIMULATED_TOKENS), strategy)
        if run.statistics.hit_rate < hits / looked_up:
            low = middle
        else:
            high = middle
    first = (low + high) / 2 if looked_up else AcceptanceModel(alpha=alpha).first
    return scenario(first, _SIMULATED_TOKENS)


def _predict(scenario: Scenario, progress: Callable[[str], None]) -> SpeedPrediction:
    comparison = compare(scenario, strategy_grid(_DRAFT_LENGTHS, _BUDGETS), progress=progress)
    best = comparison.best_fixed or comparison.adaptive
    strategy = best.strategy
    fixed = f"ssd:k={strategy.num_draft_tokens}:b={strategy.branches}"
    speeds = {
        "ar": comparison.plain.tok_s,
        "sd": comparison.sequential.tok_s,
        "ssd": comparison.adaptive.tok_s,
        fixed: best.tok_s,
    }
    chosen = "ar"
    for mode in ("sd", "ssd"):
        if speeds[mode] > _CLOSE * speeds[chosen]:
            chosen = mode
    return SpeedPrediction(
        best_mode=chosen,
        num_draft_tokens=strategy.num_draft_tokens if chosen == "ssd" else 0,
        branches=strategy.branches if chosen == "ssd" else 0,
        tok_s=speeds,
        speedup_vs_ar=speeds[chosen] / speeds["ar"],
    )


def _curve(points: dict[str, float]) -> str:
    return ",".join(f"{count}:{ms:.4f}" for count, ms in points.items())


def _rates_of_reaching(s: Statistics) -> list[float]:
    """Return the share of the rounds that reached each position: all tokens before it were
    accepted.
    """
    return [1.0, *s.per_position][: len(s.per_position)]
