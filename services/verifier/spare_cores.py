"""The drafter's cores, on which the target computes too while the drafter has nothing to do."""

from collections.abc import Sequence

from services.mlx.blas import use_spare_cores
from services.runtime.idle_flag import IdleFlag


class SpareCores:
    """Says for each pass when these cores may be used.

    Args:
        cores: none if the drafter has none of its own.
        flag: of the drafter; without it, its cores are left alone while anything is prepared.
    """

    def __init__(self, cores: Sequence[int] = (), flag: IdleFlag | None = None) -> None:
        self._cores, self._flag = tuple(cores), flag

    def begin_pass(self, *, drafter_idle: bool) -> None:
        """Compute there from now on: at any time, or once the drafter has done what it is asked.

        Args:
            drafter_idle: it is asked for nothing beside this pass.
        """
        if drafter_idle:
            use_spare_cores(self._cores)
        elif self._flag is None:
            use_spare_cores(())
        else:
            # It is about to be woken: a helper that has begun a part would have to wait for it.
            self._flag.is_idle = False
            use_spare_cores(self._cores, self._flag.word)
