"""In the process that calls: machines are asked for, their members are heard, and given back."""
