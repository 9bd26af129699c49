"""What tests share: fakes, stacks of real processes, tiny models."""
