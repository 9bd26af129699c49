"""`ssd chaos`: a stack under load, and everything that may happen to it."""
