"""Our drafters for external hosts: on standard input and output, or listening."""
