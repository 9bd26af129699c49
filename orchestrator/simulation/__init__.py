"""The product's own decisions on a device, and with a pair of models, that are only described."""
