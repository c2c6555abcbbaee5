"""Choice of the server for a request."""

from collections import Counter

from megavlm.inference.server_pool.routing import choose_server

URLS = ["http://a:1", "http://b:1", "http://c:1"]


def test_the_same_images_go_to_the_same_server_while_it_is_not_behind() -> None:
    idle = dict.fromkeys(URLS, 0)
    for key in map(str, range(20)):
        assert len({choose_server(key, idle, 1, 64) for _ in range(3)}) == 1
    assert len({choose_server(str(key), idle, 1, 64) for key in range(20)}) == 3


def test_most_keys_keep_their_server_when_one_comes() -> None:
    before = {
        str(key): choose_server(str(key), dict.fromkeys(URLS[:2], 0), 1, 64) for key in range(300)
    }
    after = {key: choose_server(key, dict.fromkeys(URLS, 0), 1, 64) for key in before}
    moved = [key for key in before if before[key] != after[key]]
    assert {after[key] for key in moved} == {URLS[2]} and 60 < len(moved) < 140


def test_loads_stay_even_whatever_the_keys() -> None:
    loads: Counter[str] = Counter(dict.fromkeys(URLS, 0))
    for _ in range(90):
        url = choose_server("one image", loads, 1, 64)
        assert url is not None
        loads[url] += 1
    assert max(loads.values()) <= 1.25 * 30 + 1


def test_a_session_stays_at_its_server_while_that_is_not_behind() -> None:
    for home in URLS:
        assert choose_server("x", dict.fromkeys(URLS, 4), 1, 64, home) == home
        assert choose_server("x", dict.fromkeys(URLS, 4) | {home: 9}, 1, 64, home) != home
    assert choose_server("x", {"a": 0}, 1, 64, "lost") == "a"


def test_a_full_server_gets_nothing() -> None:
    assert choose_server("x", {"a": 8, "b": 7}, 1, 8) == "b"
    assert choose_server("x", {"a": 8, "b": 8}, 1, 8) is None
    assert choose_server("x", {"a": 8, "b": 0}, 16, 8) == "b", "above the limit it goes alone"
    assert choose_server("x", {}, 1, 8) is None
