"""Choosing tokens beside the logits."""
