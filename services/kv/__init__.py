"""Keys and values of sequences: slots, memory, and the prefixes that are kept."""
