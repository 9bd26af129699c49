"""The loop that every service runs, and what it is made of."""
