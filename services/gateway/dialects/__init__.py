"""The HTTP APIs that clients speak: from a body to a `task.Task`, from transcripts to answers."""
