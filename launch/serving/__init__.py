"""Several models behind one HTTP server."""
