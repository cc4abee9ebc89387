"""Encoders that PyTorch's libraries implement, from folders with weights; they import it late."""
