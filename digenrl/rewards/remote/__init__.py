"""Rewards in another process: the client, the protocol and the server."""
