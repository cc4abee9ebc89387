"""Training: state, step, loop, callbacks and checkpoints."""
