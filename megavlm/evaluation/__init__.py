"""How good a policy is on a test split, and whether it looks at the images."""
