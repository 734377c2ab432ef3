"""The report of a launch, as its caller reads it: a table, a timeline, a trace."""
