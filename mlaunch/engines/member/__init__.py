"""What runs on a machine of an engine: a caller without a person."""
