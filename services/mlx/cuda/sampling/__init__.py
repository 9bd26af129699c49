"""Choosing tokens on CUDA, each row of logits in one launch."""
