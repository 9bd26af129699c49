"""A target larger than one machine: a group of processes, each with a part of the model."""
