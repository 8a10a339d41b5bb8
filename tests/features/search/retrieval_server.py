"""A server of Search-R1's protocol whose answers a test chooses."""

import contextlib
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Answering:
    """Keeps the requests, and answers them by `respond(body, number) -> (status, answer)`."""

    def __init__(self, respond):
        self.respond = respond
        self.bodies = []
        self.headers = []
        self.num_connections = 0
        self.lock = threading.Lock()

    @property
    def queries(self):
        return [query for body in self.bodies for query in body.get("queries", [body.get("query")])]


def documents(query, k=2):
    return [{"id": f"{query}-{n}", "contents": f'"Title {n}"\nText about {query}.'} for n in range(k)]


def scored(query, k=2):
    return [{"document": document, "score": 1.0 / (n + 1)} for n, document in enumerate(documents(query, k))]


def usual(body, number):
    return 200, {"result": [scored(query, body["topk"]) for query in body["queries"]]}


@contextlib.contextmanager
def serving(respond=usual, delay_s=0.0):
    """(URL, what the server has seen)."""
    seen = Answering(respond)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def setup(self):
            super().setup()
            seen.num_connections += 1

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with seen.lock:
                seen.bodies.append(body)
                seen.headers.append({name.title(): value for name, value in self.headers.items()})
                number = len(seen.bodies)
            time.sleep(delay_s)
            answer = seen.respond(body, number)
            if answer is None:  # hangs up
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

        def log_message(self, *arguments):
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
