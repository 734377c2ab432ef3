"""The messages between a caller and its members on other machines, and the streams that carry them."""
