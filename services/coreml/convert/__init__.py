"""Conversion of a model to CoreML. Only this package builds programs."""
