"""The zygote's process, and its forks, which become callers' fork servers."""
