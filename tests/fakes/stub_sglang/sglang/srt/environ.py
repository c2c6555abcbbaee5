"""The variables that server_support/megavlm_prompts.py reads."""

envs = None
