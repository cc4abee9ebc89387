"""A training run: what it is made of, how it begins, trains and ends."""
