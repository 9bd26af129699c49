"""CoreML conversion, packages and execution. Only this package imports coremltools."""
