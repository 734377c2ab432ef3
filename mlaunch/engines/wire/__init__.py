"""How a caller and its members on other machines speak."""
