"""Our CUDA kernels for the few rows of a verification."""
