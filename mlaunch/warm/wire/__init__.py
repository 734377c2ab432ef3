"""Where callers and zygotes meet, what they say to each other, and what must be equal on both sides."""
