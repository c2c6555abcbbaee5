"""Pointers that git leaves in place of large files where git-LFS has not fetched them."""

_START = b"version https://git-lfs.github.com/spec/"

FETCH = "a git-LFS pointer in place of the file: fetch it with `git lfs pull` in its repository"


def is_pointer(start: bytes) -> bool:
    """Return True if a file that begins with these bytes (64 suffice) is a pointer."""
    return start.startswith(_START)
