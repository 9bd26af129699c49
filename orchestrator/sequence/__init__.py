"""One request as a pure state machine, and the planner that decides its rounds."""
