"""Which models a stack runs, which are here, and which are worth having."""
