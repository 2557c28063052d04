"""Audits: lower bounds of the epsilon that releases really have, measured on made-up users, beside what ledgers claim.

`one_run` audits one release of every kind in seconds. `two_worlds` audits a whole fit. Nobody's rows are looked at.
"""
