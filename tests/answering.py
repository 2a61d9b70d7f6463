"""An HTTP server of a test: how it answers."""

from http.server import BaseHTTPRequestHandler


class Answering(BaseHTTPRequestHandler):
    """Answers with a status and a body, and logs nothing."""

    def answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass
