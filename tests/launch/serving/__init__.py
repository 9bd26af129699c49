"""See `launch/serving`."""
