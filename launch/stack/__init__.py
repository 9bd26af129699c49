"""A running stack: the supervisor, its children, its folder, and its observers."""
