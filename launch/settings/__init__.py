"""Settings of a stack, and the flags that several commands share."""
