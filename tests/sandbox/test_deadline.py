import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from practicum.errors import DataError, SandboxError, VerifierError
from practicum.sandbox import NoLine
from practicum.sandbox.deadline import Canary, VerifierFailed, VerifierProcess

pytestmark = pytest.mark.long

HERE = Path(__file__).parent
PYTHONPATH = f"{HERE}{os.pathsep}{HERE.parents[1] / 'src'}"


@pytest.fixture
def deadline(monkeypatch: pytest.MonkeyPatch) -> Iterator[VerifierProcess]:
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)
    made = VerifierProcess("misbehaving", seconds=0.3)
    yield made
    made.close()


def alive(pid: int) -> bool:
    try:
        # A zombie of another parent still has a pid: read its state.
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def gone(pid: int, seconds: float) -> bool:
    until = time.monotonic() + seconds
    while alive(pid) and time.monotonic() < until:
        time.sleep(0.05)
    return not alive(pid)


def test_a_score_comes_back_and_the_process_stays(deadline: VerifierProcess) -> None:
    assert deadline.call({"do": "score", "score": 0.25}) == 0.25
    first = deadline.ask({"do": "tell"}, 5.0)["pid"]
    assert deadline.call({"do": "print"}) == 1.0
    assert deadline.ask({"do": "tell"}, 5.0)["pid"] == first
    deadline.close()
    assert not alive(first)
    deadline.close()


def test_a_hanging_verifier_is_killed_counted_and_replaced(deadline: VerifierProcess) -> None:
    first = deadline.ask({"do": "tell"}, 5.0)["pid"]
    assert deadline.call({"do": "hang"}) == 0.0
    assert not alive(first)
    assert deadline.timeouts == 1
    assert deadline.call({"do": "score", "score": 1.0}) == 1.0


def test_a_hang_that_never_yields_to_python_is_killed_too(deadline: VerifierProcess) -> None:
    assert deadline.call({"do": "hang in C", "size": 10}) == 0.0
    assert deadline.timeouts == 1


def test_no_number_of_hostile_replies_ends_the_run(deadline: VerifierProcess) -> None:
    for _ in range(2):
        for what in ("hang", "die", "exit"):
            assert deadline.call({"do": what}) == 0.0
    assert deadline.timeouts == 6
    assert deadline.call({"do": "score", "score": 1.0}) == 1.0


@pytest.mark.parametrize(
    "lines",
    [
        ["garbage"],
        ["{}"],
        ["[]"],
        ["1.0"],
        ['{"value": 1.0}'],
        ['{"id": "0", "value": 1.0}'],
        ['{"id": ID}'],
        ['{"value": 1.0}', '{"id": ID, "value": 1.0}'],
        ['{"id": ID, "value": 1.0}', '{"value": 1.0}'],
        ['{"id": ID, "value": 1.0}', '{"id": ID, "value": 1.0}'],
        ["[" * 2000],
        ["\udcff"],
        ["x" * 100_000],
    ],
)
def test_what_is_no_answer_scores_zero_and_costs_the_process(
    deadline: VerifierProcess, lines: list[str]
) -> None:
    first = deadline.ask({"do": "tell"}, 5.0)["pid"]
    assert deadline.call({"do": "write", "lines": lines}) == 0.0
    assert not alive(first)
    assert (deadline.timeouts, deadline.errors) == (1, 0)
    assert deadline.call({"do": "score", "score": 0.5}) == 0.5


@pytest.mark.parametrize(
    "score", [float("nan"), float("inf"), 7.0, -0.1, 10**400, True, "1", None, [1.0]]
)
def test_what_is_no_score_of_the_verifiers_range_scores_zero(
    deadline: VerifierProcess, score: Any
) -> None:
    assert deadline.call({"do": "score", "score": score}) == 0.0
    assert (deadline.timeouts, deadline.errors) == (0, 1)


def test_half_a_line_has_the_deadline_of_a_whole_one(deadline: VerifierProcess) -> None:
    began = time.monotonic()
    assert deadline.call({"do": "drip"}) == 0.0
    assert time.monotonic() - began < 5
    assert deadline.timeouts == 1


def test_a_process_that_stops_reading_is_killed(deadline: VerifierProcess) -> None:
    assert deadline.call({"do": "hang", "padding": "x" * (1 << 20)}) == 0.0
    deadline.call({"do": "sleep", "late": ""})
    assert deadline.call({"do": "score", "score": 1.0, "padding": "x" * (1 << 20)}) == 1.0


def test_a_flood_is_not_held_in_memory(deadline: VerifierProcess) -> None:
    deadline.ask({"do": "tell"}, 5.0)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert deadline.call({"do": "flood", "bytes": 300 << 20}) == 0.0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 << 10
    assert deadline.timeouts == 1


def test_a_line_that_comes_late_is_no_answer_to_the_next_request(deadline: VerifierProcess) -> None:
    first = deadline.ask({"do": "tell"}, 5.0)["pid"]
    assert deadline.call({"do": "write later", "score": 0.25}) == 0.25
    time.sleep(0.5)
    assert deadline.call({"do": "score", "score": 0.5}) == 0.5
    assert not alive(first)
    assert deadline.timeouts == 0


def test_no_child_is_left_behind(deadline: VerifierProcess) -> None:
    for _ in range(5):
        assert deadline.call({"do": "leave a child"}) == 0.0
    assert deadline.errors == 5


def test_a_verifier_that_fails_what_it_must_know_ends_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)
    good = VerifierProcess("misbehaving", canary=Canary({"do": "score", "score": 1.0}, 1.0))
    assert good.call({"do": "score", "score": 0.5}) == 0.5
    good.close()
    for request in ({"do": "score", "score": 0.0}, {"do": "fail"}, {"do": "die"}):
        with pytest.raises(VerifierError, match="misbehaving did not start"):
            VerifierProcess("misbehaving", canary=Canary(request, 1.0)).call(
                {"do": "score", "score": 1.0}
            )


def test_a_machine_without_walls_is_refused_unless_the_recipe_allows_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)
    monkeypatch.setattr("practicum.sandbox.deadline.missing", lambda: ["files (no Landlock)"])
    with pytest.raises(
        SandboxError,
        match=r"misbehaving is not started, .* cannot wall off files .*; .*best_effort",
    ):
        VerifierProcess("misbehaving").call({"do": "score", "score": 1.0})
    allowed = VerifierProcess("misbehaving", sandbox="best_effort")
    assert (
        allowed.check_walls()
        == "the verifier misbehaving runs without a wall around files (no Landlock)"
    )
    assert allowed.call({"do": "score", "score": 1.0}) == 1.0
    allowed.close()


def test_a_verifier_that_fails_on_odd_text_scores_zero_and_is_counted(
    deadline: VerifierProcess,
) -> None:
    for _ in range(4):
        assert deadline.call({"do": "fail"}) == 0.0
    assert deadline.call({"do": "memory"}) == 0.0
    assert (deadline.errors, deadline.timeouts) == (5, 0)
    with pytest.raises(VerifierFailed, match="ZeroDivisionError: by zero"):
        deadline.ask({"do": "fail"}, 5.0)


def test_a_process_that_died_between_two_calls_is_replaced(deadline: VerifierProcess) -> None:
    pid = deadline.ask({"do": "tell"}, 5.0)["pid"]
    os.kill(pid, signal.SIGKILL)
    assert gone(pid, 5)
    assert deadline.call({"do": "score", "score": 1.0}) == 1.0
    assert deadline.timeouts == 0


def test_a_process_that_ends_after_its_answer_costs_nobody_a_score(
    deadline: VerifierProcess,
) -> None:
    assert deadline.call({"do": "end later", "score": 0.25}) == 0.25
    time.sleep(0.5)
    assert deadline.call({"do": "score", "score": 0.75}) == 0.75
    assert deadline.timeouts == 0


def test_a_line_of_many_bytes_is_cut_at_the_limit_of_time_and_size(
    deadline: VerifierProcess,
) -> None:
    began = time.monotonic()
    with pytest.raises(NoLine, match="more than 1048576 bytes"):
        deadline.ask({"do": "flood", "bytes": 16 << 20}, 2.0, 1 << 20)
    assert time.monotonic() - began < 3


def test_a_relative_folder_of_packages_is_still_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(HERE)
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([".", "", os.path.relpath(HERE.parents[1] / "src")])
    )
    relative = VerifierProcess("misbehaving", seconds=5)
    assert relative.call({"do": "score", "score": 0.5}) == 0.5
    relative.close()


def test_a_process_that_cannot_serve_says_so(deadline: VerifierProcess) -> None:
    with pytest.raises(DataError, match="not today; try again tomorrow"):
        deadline.ask({"do": "refuse"}, 5.0)
    # A model's text cannot make a verifier refuse.
    assert deadline.call({"do": "refuse"}) == 0.0


def test_a_process_that_does_not_start_says_how_to_see_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)
    with pytest.raises(
        VerifierError, match=r"misbehaving did not start .*ended by itself.*-m misbehaving broken"
    ):
        VerifierProcess("misbehaving", "broken").call({})


def test_secrets_the_current_folder_and_ctrl_c_do_not_reach_it(
    deadline: VerifierProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("API_TOKEN", "hush")
    told = deadline.ask({"do": "tell"}, 5.0)
    assert "API_TOKEN" not in told["environment"]
    assert told["environment"]["PYTHONHASHSEED"] == "0"
    assert told["path"] not in ("", os.getcwd())
    assert told["group"] == told["pid"] != os.getpgid(0)


@pytest.mark.parametrize("busy", [False, True])
def test_no_process_outlives_a_parent_that_was_killed(busy: bool) -> None:
    script = (
        "import sys; from practicum.sandbox.deadline import VerifierProcess\n"
        "deadline = VerifierProcess('misbehaving', seconds=1)\n"
        "print(deadline.ask({'do': 'tell'}, 5.0)['pid'], flush=True)\n"
        f"deadline.ask({{'do': 'hang in C', 'size': 10}}, 1.0) if {busy} else sys.stdin.read()\n"
    )
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH}
    with subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        time.sleep(0.2)
        parent.kill()
        parent.wait()
        assert gone(pid, 10)


def test_the_end_of_the_interpreter_ends_the_process() -> None:
    script = (
        "from practicum.sandbox.deadline import VerifierProcess\n"
        "print(VerifierProcess('misbehaving').ask({'do': 'tell'}, 5.0)['pid'])\n"
        "kept = VerifierProcess('misbehaving')\n"
        "print(kept.ask({'do': 'tell'}, 5.0)['pid'])\n"
    )
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        capture_output=True,
        text=True,
        env=environment,
        check=True,
    )
    assert not done.stderr
    assert not any(alive(int(pid)) for pid in done.stdout.split())
