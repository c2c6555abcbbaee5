"""An API of chat completions for agents, in front of the rollout servers. Agents see messages; what
is sampled, recorded and trained on are tokens.
"""
