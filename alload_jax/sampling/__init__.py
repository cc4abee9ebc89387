"""Drawing samples: requests, samplers at work, clips, pictures, evaluators."""
