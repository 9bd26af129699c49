"""HTTP connections."""
