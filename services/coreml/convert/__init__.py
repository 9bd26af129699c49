"""Conversion of a model to CoreML. The only folder that builds programs."""
