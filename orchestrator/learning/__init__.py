"""What the planner measures while it works: costs, acceptance, hits, and whether speculation pays."""
