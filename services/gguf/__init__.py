"""GGUF files as models: reading them, and writing them as mlx-lm folders."""
