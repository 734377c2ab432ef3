"""What mlaunch takes of torch beyond its documentation: each thing in a module that knows what holds without it."""
