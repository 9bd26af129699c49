"""MLX in this process: devices, matrix products, loading models, and changes to their layers."""
