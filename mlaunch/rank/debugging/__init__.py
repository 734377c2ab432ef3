"""A debugger in a rank, whose prompt is where its caller has called."""
