"""Kernels of our own, by the processor that they are for."""
