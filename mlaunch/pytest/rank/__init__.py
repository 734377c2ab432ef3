"""In the ranks: a test is run, and what it leaves is put back."""
