"""One file per verb of `ssd`: its flags and its help."""
