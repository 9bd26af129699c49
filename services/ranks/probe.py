"""`python -m services.ranks.probe SETTINGS`: start a group, measure its links, end it.

The result is one JSON object on standard output.
"""

import os
import sys
from pathlib import Path

import msgspec

from protocol.jobs.ranks import RankProbeResult, RankProbeSettings
from protocol.process.child import read_argument, run_reporting_errors
from protocol.settings import VerifierSettings, decode_settings
from services.kernels.cpu.library import load_blas
from services.mlx.lean_imports import leave_out_unused_libraries
from services.ranks.group import RankGroup
from services.ranks.split import Strength


def probe(settings: RankProbeSettings) -> RankProbeResult:
    """Measure the ranks of this group and their links; errors as for `RankGroup`."""
    # The same on all ranks of this machine.
    threads = max(1, (os.cpu_count() or 1) // settings.ranks.ranks_beside(0))
    load_blas(threads)
    leave_out_unused_libraries()
    from services.ranks.sharding import (  # noqa: PLC0415  # MLX after it
        bare_facts,
        join_group,
        plan_division,
    )

    whole = VerifierSettings(
        lifeline=0, address="", model=settings.model, device=settings.device, threads=threads
    )
    with RankGroup(whole, settings.ranks, loads=False) as group:
        group.begin()
        communicator = join_group(
            settings.ranks.backend,
            group.variables[0],
            group.device,
            settings.ranks.meet_timeout_s,
        )
        group.complete(bare_facts(communicator, settings.ranks.ranks_beside(0)))
        if not settings.model:
            return RankProbeResult(group.status)
        strengths = [Strength(rank.free_bytes, rank.read_bytes_s) for rank in group.status]
        plan = plan_division(Path(settings.model), communicator, settings.ranks.split, strengths)
        return RankProbeResult(group.status, plan.division, plan.obstacle, plan.proposal)


def main() -> int:
    """Run the probe and return the process's exit code."""

    def body() -> None:
        out = os.dup(1)
        os.dup2(2, 1)  # output of libraries is not part of the answer
        result = probe(decode_settings(read_argument("rank probe"), RankProbeSettings))
        os.write(out, msgspec.json.encode(result) + b"\n")

    return run_reporting_errors("rank probe", body)


if __name__ == "__main__":
    sys.exit(main())
