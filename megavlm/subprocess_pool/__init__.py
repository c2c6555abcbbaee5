"""Processes with limits on time, memory and output that run a user's code.

They are not a security boundary against hostile code. They bound the cost of faulty code, and the
cost that a model's text can cause in correct code.
"""
