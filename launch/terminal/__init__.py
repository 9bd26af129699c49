"""Output and input on a terminal."""
