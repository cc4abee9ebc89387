"""What every training step will hold and cost; NumPy only, no JAX."""
