"""Distillation: a drafter trained on the target's own law, over the target's own texts."""
