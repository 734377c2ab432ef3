"""The magics ``%ranks`` and ``%%ranks``: a notebook's cells on ranks that stay. ``%load_ext mlaunch`` brings them."""
