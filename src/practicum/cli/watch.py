"""Show a run's page while it goes on, from a server that only this machine can reach."""

import json
import sys
import webbrowser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from time import sleep
from urllib.parse import parse_qs, urlsplit

from practicum.errors import PracticumError, RecipeError, ResourceError
from practicum.report.live import Live, stage_of

HOST, PORT = "127.0.0.1", 8765
"""Where the page is served; the port is tried first, and any free one where it is taken."""

HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
}


def watch_run(folder: Path, port: int | None, open_browser: bool) -> None:
    """Serve the page until Ctrl-C; RecipeError where the folder holds no run, ResourceError where the port is taken."""
    _wait_for(folder)
    live = Live(folder)
    live.page()  # a folder that cannot be read is named before anything is served
    with open_server(live, port) as server:
        address = f"http://{HOST}:{server.server_address[1]}/"
        _say(f"watching {folder} at {address} (Ctrl-C ends it)")
        if open_browser:
            webbrowser.open(address)
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            _say(f"stopped watching {folder}; the run is not touched")


def _say(text: str) -> None:
    """One line, at once, also into a pipe."""
    print(text, flush=True)


def _wait_for(folder: Path) -> None:
    """Wait for the recipe of a run that is just starting."""
    if (folder / "pipeline.json").is_file() and stage_of(folder) == folder:
        raise RecipeError(
            f"{folder}: no stage of this pipeline has begun yet; try again in a moment"
        )
    started = (folder / "run.lock").is_file() and (folder / "run.lock").stat().st_size > 0
    if (
        started
        and not (folder / "pipeline.json").is_file()
        and not (folder / "recipe.json").is_file()
    ):
        _say(f"waiting for {folder} to begin")
        while (folder / "run.lock").stat().st_size > 0 and not (folder / "recipe.json").is_file():
            sleep(0.5)


def open_server(live: Live, port: int | None) -> ThreadingHTTPServer:
    """A server of the page on this machine alone, at `port`, or where None at the usual or any free one."""
    try:
        return _Server((HOST, PORT if port is None else port), live)
    except OSError as error:
        if port is None:
            return _Server((HOST, 0), live)
        reason = f"port {port} cannot be used ({error.strerror}); write --port 0 for any free one"
        raise ResourceError(reason) from error


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, address: tuple[str, int], live: Live) -> None:
        super().__init__(address, type("Handler", (_Handler,), {"live": live}))

    def handle_error(self, request: object, client_address: object) -> None:
        """A reader who goes away in the middle of an answer is no news; everything else is."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


class _Handler(BaseHTTPRequestHandler):
    live: Live

    def do_GET(self) -> None:
        """The page, or what is new on it."""
        if not self._is_local():
            self._answer(403, "text/plain", "only pages of this server may ask")
            return
        url = urlsplit(self.path)
        try:
            if url.path == "/":
                self._answer(200, "text/html", self.live.page())
            elif url.path == "/news":
                version = parse_qs(url.query).get("version", [""])[0]
                self._answer(
                    200,
                    "application/json",
                    json.dumps(self.live.get_changes_since(version), allow_nan=False),
                )
            else:
                self._answer(404, "text/plain", "there is only one page here: /")
        except PracticumError as error:
            self._answer(503, "text/plain", str(error))

    def _is_local(self) -> bool:
        """Whether the reader asked for this machine by name: a foreign name that leads here is another site's trick."""
        port = self.connection.getsockname()[1]
        return self.headers.get("Host") in {f"{name}:{port}" for name in (HOST, "localhost")}

    def _answer(self, status: int, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: a line a second would bury the one that matters."""
