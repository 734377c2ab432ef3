"""Device leases: the launches of a user take turns at the devices of a machine, in order of arrival."""
