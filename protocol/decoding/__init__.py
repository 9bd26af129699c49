"""Shared decoding rules of all processes: sampling, noise, acceptance, logits processors."""
