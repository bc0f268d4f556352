"""`practicum watch`: serve the live page of a run, to this machine only."""

import json
import sys
import webbrowser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from time import sleep
from urllib.parse import parse_qs, urlsplit

from practicum.errors import PracticumError, RecipeError, ResourceError
from practicum.report.live import LivePage, find_current_stage

HOST, PORT = "127.0.0.1", 8765
"""The address of the page; if the port is taken, any free port is used."""

HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
}


def watch_run(folder: Path, port: int | None, open_browser: bool) -> None:
    """Serve the page until Ctrl-C.

    Raises RecipeError if the folder holds no run, and ResourceError if the port is taken.
    """
    _wait_for_recipe(folder)
    live = LivePage(folder)
    live.render()  # an unreadable folder is reported before the server starts
    with open_server(live, port) as server:
        address = f"http://{HOST}:{server.server_address[1]}/"
        try:
            print(f"watching {folder} at {address} (Ctrl-C ends it)", flush=True)
            if open_browser:
                webbrowser.open(address)
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            print(f"stopped watching {folder}; the run is not touched", flush=True)


def _wait_for_recipe(folder: Path) -> None:
    """Wait for the recipe of a run that is starting."""
    is_pipeline = (folder / "pipeline.json").is_file()
    if is_pipeline and find_current_stage(folder) == folder:
        raise RecipeError(
            f"{folder}: no stage of this pipeline has begun yet; try again in a moment"
        )
    # A running process writes its id into the lock, and empties it when it ends: also when it
    # fails before it wrote a recipe.
    lock, recipe = folder / "run.lock", folder / "recipe.json"
    is_running = lock.is_file() and lock.stat().st_size > 0
    if is_running and not is_pipeline and not recipe.is_file():
        print(f"waiting for {folder} to begin", flush=True)
        while lock.stat().st_size > 0 and not recipe.is_file():
            sleep(0.5)


def open_server(live: LivePage, port: int | None) -> ThreadingHTTPServer:
    """Return a server of the page for this machine only.

    Without `port` it takes the usual one, or any free one. Raises ResourceError if `port` is taken.
    """
    try:
        return _WatchServer((HOST, PORT if port is None else port), live)
    except OSError as error:
        if port is None:
            return _WatchServer((HOST, 0), live)
        reason = f"port {port} cannot be used ({error.strerror}); use --port 0 for any free one"
        raise ResourceError(reason) from error


class _WatchServer(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, address: tuple[str, int], live: LivePage) -> None:
        super().__init__(address, type("Handler", (_Handler,), {"live": live}))

    def handle_error(self, request: object, client_address: object) -> None:
        """Report an error of a request, unless the browser closed the connection."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


class _Handler(BaseHTTPRequestHandler):
    live: LivePage

    def do_GET(self) -> None:
        """Send the page, or the changes since a version of it."""
        if not self._is_local():
            self._respond(403, "text/plain", "only pages of this server may send requests")
            return
        url = urlsplit(self.path)
        try:
            if url.path == "/":
                self._respond(200, "text/html", self.live.render())
            elif url.path == "/news":
                version = parse_qs(url.query).get("version", [""])[0]
                changes = self.live.get_changes_since(version)
                self._respond(200, "application/json", json.dumps(changes, allow_nan=False))
            else:
                self._respond(404, "text/plain", "there is only one page here: /")
        except PracticumError as error:
            self._respond(503, "text/plain", str(error))

    def _is_local(self) -> bool:
        # DNS rebinding: another site can point its own name at this address, and its scripts could
        # then read the page. The browser still sends the site's name as host.
        port = self.connection.getsockname()[1]
        return self.headers.get("Host") in {f"{name}:{port}" for name in (HOST, "localhost")}

    def _respond(self, status: int, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing: the page asks every second."""
