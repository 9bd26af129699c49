"""A running stack: the supervisor, its children, its folder, and those who look at it."""
