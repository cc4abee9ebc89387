"""State, step, checkpoints and telemetry of a training run."""
