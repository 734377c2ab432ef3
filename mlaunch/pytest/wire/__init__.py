"""What pytest's process and the ranks of a test send each other, or share."""
