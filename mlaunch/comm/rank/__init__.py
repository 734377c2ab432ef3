"""In ranks of mlaunch and of other launchers: objects are exchanged, groups formed, numbers reduced."""
