"""Our drafters for others: on standard input and output, or listening."""
