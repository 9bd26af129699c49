"""MLX in this process: devices, matrix products, model loading, and changes to layers."""
