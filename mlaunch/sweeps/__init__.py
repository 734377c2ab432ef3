"""Many launches at a time: ``submit``, whose futures one thread of the caller drives, ``map`` and ``grid``."""
