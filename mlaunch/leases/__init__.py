"""Device leases: which launch may use which devices of this machine, among all processes of a user, in order."""
