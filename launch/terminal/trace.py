"""A round timeline as Chrome trace events: JSON for Perfetto or chrome://tracing.

One process per track. Every slice is a complete event ("ph": "X") with its start `ts` and duration
`dur` in microseconds of the machine's monotonic clock, and details in `args`. Gaps between the
verifier's work are `idle` slices.
"""

import json
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

from protocol.errors import UsageError
from protocol.messages import TraceEvent, Track

TRACKS: tuple[Track, ...] = get_args(Track)


def write_trace(path: Path, slices: Iterable[TraceEvent]) -> None:
    """Write the slices; raise UsageError if the file cannot be written."""
    try:
        path.write_text(json.dumps({"traceEvents": list(_events(slices))}), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write the trace to {str(path)!r}: {error}") from error


def _events(slices: Iterable[TraceEvent]) -> Iterator[dict[str, Any]]:
    ordered = sorted(slices, key=lambda event: event.start_us)
    for number, track in enumerate(TRACKS, start=1):
        yield {"ph": "M", "name": "process_name", "pid": number, "args": {"name": track}}
        slices_of_track = [event for event in ordered if event.track == track]
        for event in [*slices_of_track, *(_idle(slices_of_track) if track == "verifier" else [])]:
            yield {
                "ph": "X",
                "name": event.name,
                "pid": number,
                "tid": 1,
                "ts": event.start_us,
                "dur": event.duration_us,
                "args": event.details,
            }


def _idle(work: list[TraceEvent]) -> Iterator[TraceEvent]:
    """Yield the gaps in the verifier's work."""
    for before, after in pairwise(work):
        start = before.start_us + before.duration_us
        if after.start_us > start:
            yield TraceEvent(
                track="verifier", name="idle", start_us=start, duration_us=after.start_us - start
            )
