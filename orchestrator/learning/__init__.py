"""What the planner measures at work: costs, acceptance, hits, and whether speculation pays."""
