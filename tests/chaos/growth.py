"""Memory and file descriptors of a stack's processes over time."""

import contextlib
import statistics
from dataclasses import dataclass, field

import psutil


@dataclass
class Series:
    """One process."""

    megabytes: list[float] = field(default_factory=list)
    descriptors: list[int] = field(default_factory=list)

    def take(self, pid: int) -> None:
        """One sample, unless the process is gone."""
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            self.megabytes.append(process.memory_info().rss / 2**20)
            self.descriptors.append(process.num_fds())

    def growth(self) -> tuple[float, float, float, float]:
        """Memory (MB) and descriptors, medians of the second quarter and of the last one.

        The first quarter is left out: caches fill and allocators find their size.
        """
        quarter = max(1, len(self.megabytes) // 4)
        early, late = slice(quarter, 2 * quarter), slice(-quarter, None)
        return (
            statistics.median(self.megabytes[early] or self.megabytes),
            statistics.median(self.megabytes[late]),
            statistics.median(self.descriptors[early] or self.descriptors),
            statistics.median(self.descriptors[late]),
        )
