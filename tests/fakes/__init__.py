"""Stand-ins for tests of faults only; everything else runs against the real server."""
