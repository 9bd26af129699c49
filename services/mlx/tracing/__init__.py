"""Passes of fixed shapes, traced once and replayed, which costs the host less."""
