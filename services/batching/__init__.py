"""Several sequences in one forward pass, and prompts in chunks."""
