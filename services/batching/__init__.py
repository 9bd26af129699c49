"""Several sequences in one forward pass, and chunked prefill."""
