"""Tasks: what a model is asked, how its responses are scored, and how the results are shown."""
