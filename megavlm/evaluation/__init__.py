"""Evaluation of a policy on a test split, with baselines that do not use the images."""
