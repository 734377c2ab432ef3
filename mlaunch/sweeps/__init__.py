"""Many launches at a time: ``submit``, ``map`` and ``grid``, whose futures one thread of the caller drives."""
