"""Output beyond plain lines, in notebooks and on terminals."""
