"""URLs in a data set: nothing but the public internet is spoken to, within limits."""

import socket
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from megavlm.data.media import fetch as module
from megavlm.data.media.fetch import fetch, is_public
from megavlm.data.media.image_sources import DataFolder, media_bytes
from tests.fakes.service import Served

Answer = Callable[[BaseHTTPRequestHandler], None]


class Server(Served):
    """An HTTP server on a loopback address, which notes what it is asked for."""

    def __init__(self, answer: Answer, address: str = "127.0.0.1") -> None:
        super().__init__(_Handler, address)
        self.answer = answer
        self.hits: list[str] = []


class _Handler(BaseHTTPRequestHandler):
    fake: Server

    def do_GET(self) -> None:
        self.fake.hits.append(self.path)
        try:
            self.fake.answer(self)
        except OSError:
            pass  # the client has had enough


def give(body: bytes, **headers: str) -> Answer:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        for name, value in {"Content_Length": str(len(body)), **headers}.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(body)

    return answer


def redirect(url: str) -> Answer:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(302)
        handler.send_header("Location", url)
        handler.end_headers()

    return answer


@pytest.fixture
def loopback_is_public(monkeypatch: pytest.MonkeyPatch) -> None:
    """127.0.0.1 stands for the internet; 127.0.0.2 stays what it is."""
    monkeypatch.setattr(module, "is_public", lambda address: address == "127.0.0.1")


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "127.8.8.8", "0.0.0.0", "10.1.2.3", "172.16.0.1", "192.168.1.1",
        "169.254.169.254", "100.64.0.1", "192.0.2.1", "198.18.0.1", "224.0.0.1", "240.0.0.1",
        "255.255.255.255", "::", "::1", "fe80::1", "fe80::1%eth0", "fc00::1", "fd00:ec2::254",
        "ff02::1", "2001:db8::1", "::ffff:127.0.0.1", "::ffff:169.254.169.254", "::127.0.0.1",
        "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "2002:7f00:1::", "2002:a9fe:a9fe::1",
    ],
)  # fmt: skip
def test_addresses_that_are_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", ["8.8.8.8", "1.1.1.1", "2606:4700::1111"])
def test_public_addresses(address: str) -> None:
    assert is_public(address)


def test_no_form_of_loopback_is_spoken_to() -> None:
    with Server(give(b"secret")) as server:
        port = int(server.url.rpartition(":")[2])
        for host in (
            "127.0.0.1", "localhost", "LOCALHOST", "[::ffff:127.0.0.1]", "[::1]", "0.0.0.0",
            "127.1", "2130706433", "0x7f000001", "0177.0.0.1", "127.0.0.1.",
        ):  # fmt: skip
            with pytest.raises(ValueError, match=r"not a public address|not known"):
                fetch(f"http://{host}:{port}/x.png", timeout=5)
        assert server.hits == []


@pytest.mark.parametrize(
    "url",
    [
        "http://169.254.169.254/latest/meta-data/",
        "https://[::ffff:169.254.169.254]/",
        "file:///etc/passwd",
        "ftp://127.0.0.1/x",
        "http:///x.png",
        "http://user:secret@127.0.0.1/",
        "http://127.0.0.1:99999/",
        "http://127.0.0.1/a b",
        "http://127.0.0.1/\r\nHost: x",
    ],
)
def test_refused_urls(url: str) -> None:
    with pytest.raises(ValueError) as caught:
        fetch(url, timeout=5)
    assert "secret" not in str(caught.value) and "\n" not in str(caught.value)


def test_a_name_of_a_private_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where only one of its addresses is private."""
    for addresses in (["10.0.0.1"], ["8.8.8.8", "127.0.0.1"]):
        found = [(socket.AF_INET, address) for address in addresses]
        monkeypatch.setattr(module, "_resolve", lambda *_, found=found: found)
        with pytest.raises(ValueError, match="is not a public address"):
            fetch("http://innocent.example/x.png")


@pytest.mark.usefixtures("loopback_is_public")
def test_the_address_that_was_checked_is_the_one_connected_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A name that changes between two look-ups gains nothing: there is one."""
    asked = []

    def resolve(host: str, port: int) -> list[Any]:
        asked.append(host)
        return [(socket.AF_INET, "127.0.0.1" if len(asked) == 1 else "127.0.0.2")]

    monkeypatch.setattr(module, "_resolve", resolve)
    with Server(give(b"image")) as server:
        port = int(server.url.rpartition(":")[2])
        assert fetch(f"http://rebinding.example:{port}/a?b=c#d") == b"image"
        assert asked == ["rebinding.example"] and server.hits == ["/a?b=c"]


@pytest.mark.usefixtures("loopback_is_public")
def test_redirects_are_followed_and_checked_anew() -> None:
    with Server(give(b"secret"), "127.0.0.2") as inner:
        for target in (inner.url + "/x", "file:///etc/passwd", "//127.0.0.2/x"):
            with Server(redirect(target)) as outer, pytest.raises(ValueError):
                fetch(outer.url + "/a")
        assert inner.hits == []
    with Server(give(b"image")) as target, Server(redirect(target.url + "/x")) as first:
        assert fetch(first.url) == b"image"
    with Server(redirect("/again")) as circle:
        with pytest.raises(ValueError, match="more than 5 redirects"):
            fetch(circle.url)
        assert len(circle.hits) == 6


@pytest.mark.usefixtures("loopback_is_public")
def test_large_answers_are_refused() -> None:
    with Server(give(b"x" * 1001)) as server, pytest.raises(ValueError, match="limit of 1000"):
        fetch(server.url, max_bytes=1000)

    def endless(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        while True:
            handler.wfile.write(b"x" * 10_000)

    with Server(endless) as server, pytest.raises(ValueError, match="limit of 100000"):
        fetch(server.url, max_bytes=100_000)


@pytest.mark.usefixtures("loopback_is_public")
@pytest.mark.parametrize("part", ["headers", "body"])
def test_a_server_that_drips_is_given_up(part: str) -> None:
    """Each byte is in time by itself."""
    dripped = []

    def drip(handler: BaseHTTPRequestHandler) -> None:
        if part == "body":
            handler.send_response(200)
            handler.end_headers()
        else:
            handler.wfile.write(b"HTTP/1.0 200 OK\r\nX: ")
        for _ in range(300):
            handler.wfile.write(b"x")
            handler.wfile.flush()
            dripped.append(1)
            time.sleep(0.1)

    with Server(drip) as server:
        with pytest.raises(ValueError, match="it took too long"):
            fetch(server.url, timeout=0.5)
        assert len(dripped) < 300, "it did not wait for the end"


@pytest.mark.usefixtures("loopback_is_public")
def test_other_bad_answers() -> None:
    def missing(handler: BaseHTTPRequestHandler) -> None:
        handler.send_error(404)

    for answer, message in (
        (missing, "the server returned HTTP 404"),
        (give(b"short", Content_Length="100"), "95 bytes short|IncompleteRead"),
        (give(b"x", Content_Encoding="gzip"), "compressed"),
        (lambda handler: handler.wfile.write(b"nonsense\r\n\r\n"), "BadStatusLine|not fetched"),
    ):
        with Server(answer) as server, pytest.raises(ValueError, match=message):
            fetch(server.url + "/x?token=secret")


@pytest.mark.usefixtures("loopback_is_public")
def test_messages_hold_no_query() -> None:
    with Server(give(b"x" * 10)) as server:
        with pytest.raises(ValueError) as caught:
            fetch(server.url + "/x?token=secret", max_bytes=1)
    assert "secret" not in str(caught.value)


@pytest.mark.usefixtures("loopback_is_public")
def test_rows_fetch_their_images(tmp_path: Path) -> None:
    with Server(give(b"image")) as server:
        for value in (server.url + "/a.png", {"bytes": None, "path": server.url}):
            assert media_bytes(value, DataFolder(str(tmp_path))) == b"image"
