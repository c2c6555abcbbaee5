"""Environments and tools of other libraries: gymnasium, OpenEnv, verifiers and MCP servers."""
