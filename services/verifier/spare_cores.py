"""The drafter's cores, on which the target also computes while the drafter is idle."""

from collections.abc import Sequence

from services.kernels.cpu.library import use_spare_cores
from services.runtime.idle_flag import IdleFlag


class SpareCores:
    """Controls for each pass when these cores may be used.

    Args:
        cores: none if the drafter has no cores of its own.
        flag: the drafter's; without it, its cores are left alone while anything is prepared.
    """

    def __init__(self, cores: Sequence[int] = (), flag: IdleFlag | None = None) -> None:
        self.cores, self._flag = tuple(cores), flag

    def begin_pass(self, *, drafter_idle: bool) -> None:
        """Use the cores from now on: always, or only while the drafter is idle.

        Args:
            drafter_idle: True if it has no request during this pass.
        """
        if drafter_idle:
            use_spare_cores(self.cores)
        elif self._flag is None:
            use_spare_cores(())
        else:
            # It is about to be woken, and would have to wait for a helper that has started a part.
            self._flag.is_idle = False
            use_spare_cores(self.cores, self._flag.word)
