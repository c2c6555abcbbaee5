"""Tools that a policy calls in its own words: functions, their schemas, and calls in responses."""
