"""Hostile requests and drafters, beside clients that must not notice them."""
