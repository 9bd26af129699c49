"""Kernels of our own for the few rows of a verification on CUDA."""
