"""Online estimates for the planner: costs, acceptance, hits, and the gain of speculation."""
