"""One file per command of `ssd`: its flags and its help."""
