"""The records that processes send each other."""
