"""Which rank is slow: ``slow=``, and what ``mlaunch why`` and ``mlaunch ps --watch`` say of a run that continues."""
