"""Helper processes: references, profiles, conversions of weights."""
