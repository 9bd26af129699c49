"""Our Metal kernels for the few rows of a verification."""
