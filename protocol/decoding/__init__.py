"""What decides a token, in every process alike: sampling, noise, acceptance, logits processors."""
