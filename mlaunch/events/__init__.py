"""``events=``: what a launch does, told to programs as it happens."""
