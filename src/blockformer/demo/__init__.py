"""What `blockformer demo` does, and what the examples share with it."""
