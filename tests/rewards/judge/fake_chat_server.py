"""An OpenAI-compatible chat server on loopback that answers by the brightness of images, and can be told to fail."""

from __future__ import annotations

import base64
import io
import json
import math
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
from PIL import Image

Token = tuple[str, float]
"""Text and probability."""


@dataclass(frozen=True)
class Fault:
    """What is sent instead of an answer."""

    status: int = 200
    body: str = "{}"
    headers: dict[str, str] = field(default_factory=dict)
    cut: bool = False
    """Whether the connection ends before the body does."""


HANG = Fault(status=0)
"""No answer until the server is closed."""


def refusal(status: int, message: str, **headers: str) -> Fault:
    return Fault(status, json.dumps({"error": {"message": message}}), headers)


@dataclass(frozen=True)
class Asked:
    """What a request asks."""

    body: dict[str, Any]
    headers: dict[str, str]

    @property
    def images(self) -> list[Image.Image]:
        parts = [part for message in self.body["messages"] for part in message["content"] if isinstance(part, dict)]
        uris = [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]
        assert all(uri.startswith("data:image/png;base64,") for uri in uris)
        return [Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2]))) for uri in uris]

    @property
    def brightness(self) -> float:
        return float(np.mean([np.asarray(image).mean() / 255 for image in self.images]))

    @property
    def text(self) -> str:
        user = next(message for message in self.body["messages"] if message["role"] == "user")
        return str(user["content"][-1]["text"])

    @property
    def begun(self) -> str:
        """What the answer begins with."""
        last = self.body["messages"][-1]
        return str(last["content"]) if last["role"] == "assistant" else ""


def yes_if_bright(asked: Asked) -> list[Token]:
    """The probability of yes is the brightness, shared by two spellings."""
    yes = asked.brightness
    return [("Yes", 0.5 * yes), (" yes", 0.25 * yes), ("No", 0.75 * (1 - yes)), ("The", 0.25)]


class FakeChatServer:
    """Serves until closed; also notes what it was asked."""

    def __init__(self, answer: Callable[[Asked], list[Token]] = yes_if_bright, port: int = 0) -> None:
        self.answer = answer
        self.models = ["judge"]
        self.faults: list[Fault] = []
        """For the next requests, one each."""
        self.fault_of: Callable[[Asked], Fault | None] = lambda asked: None
        """For requests that are like this."""
        self.entered: Callable[[], None] = lambda: None
        """Called by each request while it is served."""
        self.asked: list[Asked] = []
        self.num_connections = 0
        self.most_at_once = 0
        self._at_once = 0
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._sockets: list[socket.socket] = []
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def setup(self) -> None:
                super().setup()
                with fake._lock:
                    fake.num_connections += 1
                    fake._sockets.append(self.connection)

            def do_GET(self) -> None:
                self._send(200, json.dumps({"data": [{"id": name} for name in fake.models]}))

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                fake._serve(self, Asked(body, dict(self.headers)))

            def _send(self, status: int, body: str, headers: dict[str, str] | None = None, missing: int = 0) -> None:
                content = body.encode()
                self.send_response(status)
                for name, value in {**(headers or {}), "Content-Length": str(len(content) + missing)}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *args: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: Any, client_address: Any) -> None:
                pass  # clients that have gone

        self._server = Server(("127.0.0.1", port), Handler)
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}/v1"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        for connection in self._sockets:
            with suppress(OSError):  # those that have ended
                connection.shutdown(socket.SHUT_RDWR)

    def _serve(self, handler: Any, asked: Asked) -> None:
        with self._lock:
            self.asked.append(asked)
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
            fault = self.faults.pop(0) if self.faults else self.fault_of(asked)
        try:
            self.entered()
            if fault is HANG:
                self._closing.wait(60)
                handler.close_connection = True
                return
        finally:
            with self._lock:  # before the answer is sent: the client asks again as soon as it has it
                self._at_once -= 1
        if fault is not None:
            handler.close_connection = fault.cut
            handler._send(fault.status, fault.body, fault.headers, missing=10 if fault.cut else 0)
        else:
            handler._send(200, completion(self.answer(asked)))


def completion(tokens: list[Token]) -> str:
    """Write a chat completion of one token; candidates without probability are as vLLM sends masked ones."""
    top = [{"token": text, "logprob": math.log(chance) if chance > 0 else -9999.0} for text, chance in tokens]
    content = [{**top[0], "top_logprobs": top}]
    return json.dumps({"choices": [{"message": {"content": top[0]["token"]}, "logprobs": {"content": content}}]})
