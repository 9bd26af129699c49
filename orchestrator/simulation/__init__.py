"""Simulation: the product's decisions on a modelled device with a modelled pair of models."""
