"""The place where callers and zygotes meet, their messages, and the facts that must be equal on both sides."""
