"""Reward servers at free loopback ports, in a thread of the test."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from digenrl.rewards import Reward
from digenrl.rewards.remote.server import RewardServer


class ServerThread:
    """A server that runs."""

    def __init__(self, reward: Reward, **settings: Any) -> None:
        self._server = RewardServer(reward, **{"port": 0, **settings})
        self._server.bind()
        self._server.set_up()
        self.url = self._server.url
        self.port = int(self.url.rpartition(":")[2])
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._server.run, args=[self._note_ready])
        self._thread.start()
        assert self._ready.wait(60)

    def _note_ready(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ready.set()

    @property
    def connections(self) -> set[Any]:
        """Those that are open."""
        return set(self._server._server.server_state.connections)

    @property
    def num_requests(self) -> int:
        """Those that wait for their answer."""
        return len(self._server._server.server_state.tasks)

    def stop(self) -> None:
        self._server.stop()
        self._thread.join()

    def kill(self) -> None:
        """Break off all connections, as the end of its process does, and be gone."""
        server = self._server._server

        def abort() -> None:
            server.force_exit = server.should_exit = True
            for listener in server.servers:
                listener.close()
            for connection in list(server.server_state.connections):
                connection.transport.abort()

        self._loop.call_soon_threadsafe(abort)
        self._thread.join()


@contextmanager
def served(reward: Reward, **settings: Any) -> Iterator[ServerThread]:
    """Serve a reward."""
    server = ServerThread(reward, **settings)
    try:
        yield server
    finally:
        server.stop()
