"""The whole pipeline, in real processes."""
