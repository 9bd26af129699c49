"""Models: resolution, local catalog, and recommendations."""
