"""Statistics of single requests and of recent ones together, and the timeline of a round."""
