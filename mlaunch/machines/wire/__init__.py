"""How the gate and the links talk, over connections that strangers may open, too."""
