"""Policies: from a data set's columns to an epoch of micro-batches. One class each.

To add a policy, write a frozen dataclass that is a `Policy` (`policy.py`), or a `Bucketed` one with
`rows_per_bucket` like `EqualTokens` (`bucketed.py`): it says what it can do and builds itself from
the config. Name it in `registry.py`, or decorate it with `register_policy` in code of your own.
"""
