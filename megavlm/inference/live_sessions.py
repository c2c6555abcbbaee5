"""Admission of sessions: a server plays no more of them than its prefix cache holds.

A server evicts what was used least recently. While the live sessions fit, it evicts only sessions
that have ended, so that nothing has to be released at their end. With more live sessions, each turn
finds that the turns of others have evicted its prefix, and computes it again
(tests/benchmarks/bench_sessions.py).

It does not count an agent's branches from its longest call, or the recurrent states of models with
linear attention, whose cache is another one. It does not apply behind a router, because that
chooses the servers.
"""

from collections import Counter
from collections.abc import Hashable, Sequence

from megavlm.inference.server_pool.routing import Address


class LiveSessions:
    """Groups whose sessions are played, with the cache that they need at their servers.

    A session is expected to add as many tokens to its first prompt as the longest session so far;
    until a group has ended, as many as the configuration allows.
    """

    def __init__(self, most: int | None) -> None:
        """most: Tokens that a session may add to its first prompt; None if sessions are not bounded
        because they have one turn.
        """
        self._most, self._longest, self._has_ended = most, 0, False
        self._live: dict[Hashable, tuple[str, int, int]] = {}  # URL, prompt's tokens, sessions
        self._prompt_tokens, self._num_sessions = Counter[str](), Counter[str]()  # by URL

    def number(self, url: str) -> int:
        """Return the number of live sessions at a server."""
        return self._num_sessions[url]

    def has_room(self, address: Address, prompts: Sequence[int], n: int) -> bool:
        """Return True if groups fit into a server's cache beside its live groups. A server without
        live groups always has room.

        prompts: Number of tokens of each group's prompt. n: Number of sessions of each group.
        """
        most, url = self._most, address.url
        if most is None or address.cache_tokens is None or not self._num_sessions[url]:
            return True
        growth = self._longest if self._has_ended else most
        num_sessions = self._num_sessions[url] + n * len(prompts)
        used = self._prompt_tokens[url] + sum(prompts) + num_sessions * growth
        return used <= address.cache_tokens

    def start(self, group: Hashable, url: str, prompt: int, n: int) -> None:
        """Count a group as live at a server. prompt: Number of tokens of its first prompt."""
        self.stop(group)
        self._live[group] = url, prompt, n
        self._prompt_tokens[url] += prompt
        self._num_sessions[url] += n

    def grow(self, num_tokens: int) -> None:
        """Note how many tokens a session has added to its first prompt."""
        self._longest = max(self._longest, num_tokens)

    def stop(self, group: Hashable) -> None:
        """Count a group as live no longer, if it was."""
        if group in self._live:
            url, prompt, n = self._live.pop(group)
            self._prompt_tokens[url] -= prompt
            self._num_sessions[url] -= n

    def end(self, group: Hashable) -> None:
        """Note that all sessions of a group have ended."""
        self.stop(group)
        self._has_ended = True
