"""What is shown beyond plain lines, in notebooks and on terminals."""
