"""The fork server as its caller sees it."""
