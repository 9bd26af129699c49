"""Tools: how they are described to a model, and how its calls are written and parsed."""
