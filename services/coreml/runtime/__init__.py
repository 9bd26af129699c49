"""Executors of converted packages: CoreML itself, and the reference runtime."""
