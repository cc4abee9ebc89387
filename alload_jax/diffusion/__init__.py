"""Flow matching: noise levels, the training target, and samplers."""
