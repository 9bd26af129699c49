"""Tools: how a model is told of them, how it writes calls, and how those are read."""
