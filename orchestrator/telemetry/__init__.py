"""Statistics of a request, of all requests lately, and the timeline of a round."""
