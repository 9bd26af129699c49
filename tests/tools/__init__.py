"""What is run by hand or by make: an audit, a fuzzer, the listing of modules."""
