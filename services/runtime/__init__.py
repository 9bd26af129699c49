"""The loop that every service runs, and its parts."""
