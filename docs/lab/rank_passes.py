"""T_v(m) of a target over 1, 2, ... ranks of this machine, one group after the other.

`python docs/lab/rank_passes.py --model FOLDER --ranks 1,2,3 --rows 1,2,4,8,16`: a line of JSON per
number of ranks, with the median milliseconds of seven verifications of so many rows behind a
context of 128 tokens, by the code of the verifier (`services/tools/profiler.py`).
"""

import argparse
import json
import sys

from launch.bench.profile_models import ProfilerWorker
from launch.models.pair import pair_of
from launch.settings.settings import StackSettings
from protocol.jobs.profile import TimeRequest, TimeResult


def main() -> None:
    """Time every group."""
    parser = argparse.ArgumentParser(description="Verifications by number of ranks.")
    parser.add_argument("--model", required=True)
    parser.add_argument("--ranks", default="1,2")
    parser.add_argument("--rows", default="1,2,4,6,8,12,16")
    parser.add_argument("--backend", default="")
    parser.add_argument("--split", default="")
    given = parser.parse_args()
    rows = [int(number) for number in given.rows.split(",")]
    for ranks in map(int, given.ranks.split(",")):
        several = {"backend": given.backend, "split": given.split} if ranks > 1 else {}
        settings = StackSettings(
            model=given.model, draft_backend="ngram", target_ranks=ranks, **several
        )
        with ProfilerWorker("verifier", settings, pair_of(settings)) as profiler:
            profiler.await_ready()
            found = profiler.ask(TimeRequest(rows, list(range(2, 130))), TimeResult)
        row = {"ranks": ranks, "unit": found.compute_unit, "ms": found.medians_ms}
        sys.stdout.write(json.dumps(row) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
