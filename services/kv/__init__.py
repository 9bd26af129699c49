"""Keys and values of sequences: slots, memory, and the prefix cache."""
