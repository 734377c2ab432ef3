"""The search for slow ranks: ``slow=``, and lines of ``mlaunch why`` and ``mlaunch ps --watch``."""
