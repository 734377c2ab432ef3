"""How gate and links talk, over connections that strangers may open, too."""
