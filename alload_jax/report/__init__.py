"""Pictures and figures from plans and runs."""
