"""Watching a run: its page over HTTP, only for this machine, with only new data."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from report_pages import copied
from toy import environment

from practicum.cli.watch import open_server, watch_run
from practicum.errors import RecipeError, ResourceError
from practicum.report.live import LivePage, find_current_stage, find_writer_state


@pytest.fixture
def going_on(finished: Path, tmp_path: Path) -> Path:
    """Return an unfinished run; its writer is this process."""
    folder = copied(finished, tmp_path / "toy")
    for name in ("summary.json", "after.json"):
        (folder / name).unlink()
    sign(folder, os.getpid())
    return folder


@pytest.fixture
def address(going_on: Path) -> Iterator[str]:
    server = open_server(LivePage(going_on), 0)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/"
    server.shutdown()
    thread.join()
    server.server_close()


def sign(folder: Path, pid: int) -> None:
    (folder / "run.lock").write_text(
        json.dumps({"pid": pid, "host": socket.gethostname(), "boot_id": ""})
    )


def get(address: str, **headers: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(
            urllib.request.Request(address, headers=headers), timeout=30
        ) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_only_what_changed_is_news(going_on: Path) -> None:
    live = LivePage(going_on)
    first = live.get_changes_since("")
    assert set(first["html"]) == set(first["order"]) and first["status"] == "step 4 of 4; running"
    nothing = live.get_changes_since(first["version"])
    assert (
        "html" not in nothing and nothing["version"] == first["version"] and not nothing["finished"]
    )
    live = LivePage(going_on)
    with (going_on / "alarms.jsonl").open("a") as file:
        file.write(
            json.dumps({"step": 4, "id": "M1", "name": "loss", "value": 1.0, "baseline": 0.1})
            + "\n"
        )
    changed = live.get_changes_since(first["version"])
    assert {"alarms", "curves"} <= set(changed["html"]) and not {"heat", "again", "verdict"} & set(
        changed["html"]
    )


def test_a_run_that_nobody_writes_is_named(going_on: Path) -> None:
    assert find_writer_state(going_on) == "alive"
    (going_on / "run.lock").write_text("")
    assert find_writer_state(going_on) == "gone"
    assert "resume with --resume" in LivePage(going_on).get_changes_since("")["status"]
    (going_on / "run.lock").write_text(json.dumps({"pid": 1, "host": "elsewhere"}))
    assert (
        find_writer_state(going_on) == "unknown"
        and find_writer_state(going_on / "nowhere") == "unknown"
    )


def test_a_run_that_was_silent_for_long_is_named(going_on: Path) -> None:
    for path in going_on.glob("*.json*"):
        os.utime(path, (1, 1))
    news = LivePage(going_on).get_changes_since("")
    assert "nothing was written for" in news["status"] and news["kind"] == "late"


def test_the_page_and_its_news_are_served_to_this_machine_alone(address: str) -> None:
    status, page = get(address)
    assert status == 200 and "connect-src 'self'" in page and "data-live=" in page
    status, news = get(f"{address}news?version=")
    assert status == 200 and json.loads(news)["title"] == "toy"
    assert get(address, Host="evil.example")[0] == 403
    assert get(f"{address}etc/passwd") == (404, "there is only one page here: /")
    assert socket.gethostbyname(address.split("/")[2].split(":")[0]) == "127.0.0.1"


def test_a_folder_that_breaks_while_watched_is_named(address: str, going_on: Path) -> None:
    (going_on / "recipe.json").unlink()
    status, text = get(f"{address}news?version=")
    assert status == 503 and "holds no run: recipe.json is missing" in text


def test_a_pipeline_is_watched_at_its_last_stage(going_on: Path, tmp_path: Path) -> None:
    assert find_current_stage(going_on) == going_on
    for name in ("01-a", "02-b"):
        (tmp_path / "line" / "stages" / name).mkdir(parents=True)
    (tmp_path / "line" / "pipeline.json").write_text("{}")
    with pytest.raises(RecipeError, match="no stage of this pipeline has begun yet"):
        watch_run(tmp_path / "line", None, False)
    (tmp_path / "line" / "stages" / "01-a" / "recipe.json").write_text("{}")
    assert find_current_stage(tmp_path / "line").name == "01-a"


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"holds no run: recipe.json is missing"):
        watch_run(tmp_path, None, False)


def test_a_port_that_is_taken_is_named(going_on: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            ResourceError, match=rf"port {port} cannot be used .*; use --port 0 for any free one"
        ):
            watch_run(going_on, port, False)


@pytest.mark.slow
def test_one_line_begins_it_and_one_ends_it(going_on: Path) -> None:
    command = [sys.executable, "-m", "practicum", "watch", str(going_on), "--port", "0"]
    # A background job ignores SIGINT and its children inherit that, so the child restores it.
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        watchdog = threading.Timer(60, process.kill)
        watchdog.start()
        try:
            assert process.stdout is not None
            first = process.stdout.readline()
            assert (
                first.startswith(f"watching {going_on} at http://127.0.0.1:")
                and "Ctrl-C ends it" in first
            )
            process.send_signal(signal.SIGINT)
            rest, errors = process.communicate()
        finally:
            watchdog.cancel()
            process.kill()
        assert rest == f"stopped watching {going_on}; the run is not touched\n" and errors == ""
        assert process.returncode == 0
