"""Helper processes as those who start them see them."""
