"""Processes with limits on time, memory and output, in which code of a user's runs.

They are no security boundary against hostile code. They bound the cost of faulty code, and the cost
that a model's text can cause in correct code.
"""
