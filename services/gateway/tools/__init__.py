"""Tools: how a model learns of them, how it writes calls, and how those are read."""
