"""Charts of plans and summaries of runs."""
