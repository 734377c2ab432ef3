"""``events=``: events of a launch, sent to programs as they happen."""
