"""Plans the samples and predicts the cost of every training step, without JAX."""
