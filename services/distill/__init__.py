"""Distillation: a drafter trained on the target's own distribution, over the target's own texts."""
