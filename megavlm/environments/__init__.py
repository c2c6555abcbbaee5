"""Environments of a policy: episodes of one or several turns. No torch."""
