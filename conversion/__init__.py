"""Official checkpoints in, and back out, exactly."""
