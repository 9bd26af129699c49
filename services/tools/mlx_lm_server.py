"""`python -m services.tools.mlx_lm_server ARGUMENTS`: mlx-lm's own server, for comparisons.

It uses the same matrix products as our services (`machine`) and all cores; the arguments are
mlx-lm's.
"""

import os
import runpy
import sys

from services.kernels.cpu.library import load_blas


def main() -> None:
    """Serve until stopped."""
    load_blas(os.cpu_count() or 1)
    sys.argv[0] = "mlx_lm.server"
    runpy.run_module("mlx_lm.server", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
