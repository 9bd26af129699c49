"""Tests of `services/gguf/`."""
