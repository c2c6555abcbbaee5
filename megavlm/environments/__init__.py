"""What a policy talks to: episodes of one or several turns. No torch."""
