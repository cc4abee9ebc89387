"""What happens around training steps: a small class with hooks on the loop for each."""
