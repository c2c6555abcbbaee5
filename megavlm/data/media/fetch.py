"""Download of images from untrusted http(s) URLs.

A data file must not make the trainer send requests into its own network (server-side request
forgery), so connections go to public addresses only. A name is resolved once, and the connection
uses the address that was checked, so that it cannot change in between; each redirect is checked
again. Proxies are not used, because the address behind a proxy could not be checked.
"""

import http.client
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from urllib.parse import SplitResult, urljoin, urlsplit

MAX_BYTES = 2**25  # 32 MiB for an encoded image
TIMEOUT = 20.0  # seconds for everything after the name is resolved, redirects included
MAX_REDIRECTS = 5
_CHUNK = 2**16
_REDIRECTS = (301, 302, 303, 307, 308)

# IPv6 ranges whose addresses embed an IPv4 address and may be translated to it (NAT64).
_TRANSLATED = tuple(ipaddress.ip_network(text) for text in ("64:ff9b::/96", "64:ff9b:1::/48"))


def fetch(url: str, *, max_bytes: int = MAX_BYTES, timeout: float = TIMEOUT) -> bytes:
    """Return the body of a GET request.

    Raises ValueError for a scheme other than http and https, for credentials in the URL, for an
    address that is not public, for more than max_bytes, `timeout` seconds or MAX_REDIRECTS, and for
    a status other than 200.
    """
    deadline = time.monotonic() + timeout
    for _ in range(MAX_REDIRECTS + 1):
        result = _request(_checked(url), max_bytes, deadline)
        if isinstance(result, bytes):
            return result
        url = urljoin(url, result)
    raise ValueError(f"{_shown(url)}: more than {MAX_REDIRECTS} redirects")


def check_url(url: str) -> None:
    """Raise ValueError for a URL that `fetch` refuses without a network request: because of its
    form, or because it holds an address that is not public.
    """
    host = _checked(url).hostname or ""
    try:
        address = "127.0.0.1" if host == "localhost" else str(ipaddress.ip_address(host))
    except ValueError:
        return  # a name
    _check_public(url, address)


def is_public(address: str) -> bool:
    """Return True if an IP address is public: not loopback, private, link-local, shared, multicast
    or reserved, and not an IPv6 form of such an IPv4 address.
    """
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        carried = ip.ipv4_mapped or ip.sixtofour or (ip.teredo and ip.teredo[1])
        if any(ip in network for network in _TRANSLATED):
            carried = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        if carried and not is_public(str(carried)):
            return False
        if int(ip) >> 32 == 0:  # ::a.b.c.d, the deprecated "compatible" form
            return False
    return ip.is_global and not ip.is_multicast and not ip.is_reserved


def _checked(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as error:
        raise ValueError(f"{_shown(url)}: not a URL ({error})") from error
    if parts.scheme not in ("http", "https"):
        raise ValueError(f"{_shown(url)}: only http and https URLs are fetched")
    if parts.username is not None or parts.password is not None:
        raise ValueError("an image's URL holds credentials; store the image beside the data")
    if not parts.hostname:
        raise ValueError(f"{_shown(url)}: the URL has no host")
    if not (url.isascii() and url.isprintable()) or " " in url:
        raise ValueError(f"{_shown(url)}: the URL holds characters that must be quoted")
    return parts


def _resolve(host: str, port: int) -> Sequence[tuple[socket.AddressFamily, str]]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [(family, str(address[0])) for family, _, _, _, address in found]


def _check_public(url: str, address: str) -> None:
    if not is_public(address):
        raise ValueError(f"{_shown(url)}: {address} is not a public address")


def _connect(parts: SplitResult, deadline: float) -> socket.socket:
    """Connect to the host's first address. Raises ValueError unless all of them are public."""
    host, port = parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
    assert host is not None
    try:
        addresses = _resolve(host, port)
    except (OSError, UnicodeError) as error:
        raise ValueError(f"{_shown(parts.geturl())}: the name is not known ({error})") from error
    for _, address in addresses:
        _check_public(parts.geturl(), address)
    family, address = addresses[0]
    with ExitStack() as stack:
        connection = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
        connection.settimeout(max(deadline - time.monotonic(), 0.001))
        connection.connect((address, port))
        if parts.scheme == "https":
            context = ssl.create_default_context()
            connection = context.wrap_socket(connection, server_hostname=host)
        stack.pop_all()  # keep the socket open: it is closed only if one of these steps fails
    return connection


class _Connection(http.client.HTTPConnection):
    """HTTP connection over a socket that is already connected."""

    def __init__(self, host: str, sock: socket.socket) -> None:
        super().__init__(host)
        self.sock = sock


def _request(parts: SplitResult, max_bytes: int, deadline: float) -> bytes | str:
    """Send a GET request. Returns the body (bytes), or the location of a redirect (str)."""
    url = _shown(parts.geturl())
    timer = None
    try:
        sock = _connect(parts, deadline)
        # A socket's timeout is per read: a server that sends single bytes would never exceed it.
        timer = threading.Timer(max(deadline - time.monotonic(), 0.0), _break, (sock,))
        timer.daemon = True
        timer.start()
        connection = _Connection(parts.netloc, sock)
        try:
            target = parts._replace(scheme="", netloc="", fragment="").geturl() or "/"
            headers = {"User-Agent": "megavlm", "Accept": "image/*", "Accept-Encoding": "identity"}
            connection.request("GET", target, headers=headers)
            response = connection.getresponse()
            if response.status in _REDIRECTS and (location := response.getheader("Location")):
                return location
            if response.status != 200:
                raise ValueError(f"{url}: the server returned HTTP {response.status}")
            return _body(response, url, max_bytes, deadline)
        finally:
            connection.close()
    except (OSError, http.client.HTTPException) as error:
        late = time.monotonic() >= deadline
        reason = "it took too long" if late else f"{type(error).__name__}: {error}"
        raise ValueError(f"{url}: not fetched ({reason})") from error
    finally:
        if timer is not None:
            timer.cancel()


def _body(response: http.client.HTTPResponse, url: str, max_bytes: int, deadline: float) -> bytes:
    if response.getheader("Content-Encoding", "identity") != "identity":
        raise ValueError(f"{url}: the response is compressed although no compression was requested")
    chunks, size = [], 0
    while chunk := response.read(_CHUNK):
        size += len(chunk)
        if size > max_bytes:
            raise ValueError(f"{url}: larger than the limit of {max_bytes} bytes")
        chunks.append(chunk)
    # If the body has no known length, a broken connection looks like its end.
    if time.monotonic() >= deadline:
        raise ValueError(f"{url}: not fetched (it took too long)")
    if response.length:
        raise ValueError(f"{url}: the response is {response.length} bytes short")
    return b"".join(chunks)


def _break(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # closed already


def _shown(url: str) -> str:
    """Return a URL for error messages, shortened and without a query, since it may hold a token."""
    return ascii(url.partition("?")[0][:200])[1:-1]
