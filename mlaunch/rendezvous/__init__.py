"""How ranks and machines find each other: stores, which separate processes or threads serve, and their clients."""
