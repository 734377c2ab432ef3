"""``numa=``: each rank runs on the CPUs near its device, and may get its memory there."""
