"""How forward passes are described, started and read."""
