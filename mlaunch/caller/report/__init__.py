"""Reports for the caller: the words of a failure, and the report of a launch."""
