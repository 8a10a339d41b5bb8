"""A local HTTP server whose answers a test chooses, for tools and rewards that ask one."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeAlias

Body: TypeAlias = dict[str, Any]
HTTPAnswer: TypeAlias = tuple[Any, ...] | None
"""(status, content, *headers): content is text, or what becomes JSON; headers are pairs. None hangs up."""


class LocalServer:
    """What a server has been asked, and the function that answers.

    Args:
        respond: from the body of a POST request, read as JSON, and its number (from 1) to the answer. It runs in
            several threads.
    """

    def __init__(self, respond: Callable[[Body, int], HTTPAnswer]) -> None:
        self.respond = respond
        self.bodies: list[Body] = []
        """The body of each request, in the order in which they came."""
        self.headers: list[dict[str, str]] = []
        """Their headers, with names in title case."""
        self.num_connections = 0
        self.lock = threading.Lock()


@contextlib.contextmanager
def local_server(
    respond: Callable[[Body, int], HTTPAnswer], delay_s: float = 0.0
) -> Iterator[tuple[str, LocalServer]]:
    """Serve on a free port of this machine until the block ends.

    Args:
        respond: see `LocalServer`; `seen.respond` may be replaced while it runs.
        delay_s: seconds that every answer takes.

    Yields:
        The URL, without a slash at its end, and the `LocalServer`.
    """
    seen = LocalServer(respond)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def setup(self) -> None:
            super().setup()
            seen.num_connections += 1

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with seen.lock:
                seen.bodies.append(body)
                seen.headers.append({name.title(): value for name, value in self.headers.items()})
                number = len(seen.bodies)
            time.sleep(delay_s)
            answer = seen.respond(body, number)
            if answer is None:
                self.close_connection = True
                return
            status, content, *headers = answer
            data = content.encode() if isinstance(content, str) else json.dumps(content).encode()
            self.send_response(status)
            for name, value in headers:
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *arguments: object) -> None:  # its lines would stand among those of the tests
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", seen
    finally:
        seen.respond = lambda body, number: None  # connections that are still open
        server.shutdown()
        server.server_close()
