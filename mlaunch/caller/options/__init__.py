"""The options of a launch: their values, checks, texts and types."""
