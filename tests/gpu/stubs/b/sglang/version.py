"""The oldest release that megavlm supports. SGLang 0.5.17 has a stand-in for the sessions that it
lacks (weight_sessions.py).
"""

__version__, __version_tuple__ = "0.5.21", (0, 5, 21)
