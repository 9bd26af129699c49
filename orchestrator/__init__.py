"""The conductor: sequences, the speculation cache, plans, text, and the client's side."""
