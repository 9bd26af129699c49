"""Token selection from logits."""
