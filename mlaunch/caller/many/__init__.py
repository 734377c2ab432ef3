"""Many launches at a time: futures of launches, all driven by one thread of the caller."""
