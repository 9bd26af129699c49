"""`ssd bench`: measurements, their statistics, and their presentation."""
