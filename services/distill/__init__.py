"""Distillation: train a drafter on the target's own distribution, over the target's own texts."""
