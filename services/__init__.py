"""The actors: verifier and drafter, and the backends that compute for them."""
