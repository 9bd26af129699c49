"""Token selection on CUDA, each row of logits in one launch."""
