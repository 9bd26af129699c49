"""Decoders on a CPU from the bits of their files, by the program in `c/`."""
