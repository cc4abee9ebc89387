"""Policies: from a data set's columns to an epoch of micro-batches. One small file each.

To add a policy, write a file with a frozen dataclass that has `plan_epoch` (`policy.py`), or a
`Bucketed` one with `rows_per_bucket` like `equal_tokens.py`, and name it in `PolicyName` and
`make_policy` of `planning/settings.py`.
"""
