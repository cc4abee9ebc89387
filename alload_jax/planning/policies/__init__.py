"""Policies: from a data set's columns to an epoch of micro-batches. One small file each.

To add a bucketed policy, write a file like `equal_tokens.py` with a class that has
`rows_per_bucket`, and name it in `PolicyName` and `make_policy` of `planning/settings.py`.
"""
