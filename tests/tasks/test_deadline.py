import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from practicum.errors import DataError, VerifierError
from practicum.tasks._deadline import Deadline, Failed

pytestmark = pytest.mark.long

HERE = Path(__file__).parent


@pytest.fixture
def deadline(monkeypatch: pytest.MonkeyPatch) -> Iterator[Deadline]:
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    made = Deadline("misbehaving", seconds=0.3)
    yield made
    made.close()


def alive(pid: int) -> bool:
    try:
        # A zombie of another parent still has a pid: read its state.
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(pid: int, seconds: float) -> bool:
    until = time.monotonic() + seconds
    while alive(pid) and time.monotonic() < until:
        time.sleep(0.05)
    return not alive(pid)


def test_a_score_comes_back_and_the_process_stays(deadline: Deadline) -> None:
    assert deadline.call({"do": "score", "score": 0.25}) == 0.25
    first = deadline.ask({"do": "tell"}, 5.0)["pid"]
    assert deadline.call({"do": "print"}) == 1.0
    assert deadline.ask({"do": "tell"}, 5.0)["pid"] == first
    deadline.close()
    assert not alive(first)
    deadline.close()


def test_a_hanging_verifier_is_killed_counted_and_replaced(deadline: Deadline) -> None:
    first = deadline.ask({"do": "tell"}, 5.0)["pid"]
    assert deadline.call({"do": "hang"}) == 0.0
    assert not alive(first)
    assert deadline.timeouts == 1
    assert deadline.call({"do": "score", "score": 1.0}) == 1.0


def test_a_hang_that_never_yields_to_python_is_killed_too(deadline: Deadline) -> None:
    assert deadline.call({"do": "hang in C", "size": 10}) == 0.0
    assert deadline.timeouts == 1


def test_three_hangs_in_a_row_end_the_run(deadline: Deadline) -> None:
    deadline.call({"do": "hang"})
    deadline.call({"do": "die"})
    deadline.call({"do": "score", "score": 1.0})
    deadline.call({"do": "die"})
    deadline.call({"do": "die"})
    with pytest.raises(VerifierError, match=r"misbehaving gave no answer 3 times in a row \(over 0.3 s\); use another"):
        deadline.call({"do": "hang"})
    assert deadline.timeouts == 5


def test_a_verifier_that_fails_on_odd_text_scores_zero_and_is_counted(deadline: Deadline) -> None:
    for _ in range(4):
        assert deadline.call({"do": "fail"}) == 0.0
    assert deadline.call({"do": "memory"}) == 0.0
    assert (deadline.errors, deadline.timeouts) == (5, 0)
    with pytest.raises(Failed, match="ZeroDivisionError: by zero"):
        deadline.ask({"do": "fail"}, 5.0)


def test_a_process_that_died_between_two_calls_is_replaced(deadline: Deadline) -> None:
    pid = deadline.ask({"do": "tell"}, 5.0)["pid"]
    os.kill(pid, signal.SIGKILL)
    assert gone(pid, 5)
    assert deadline.call({"do": "score", "score": 1.0}) == 0.0
    assert deadline.call({"do": "score", "score": 1.0}) == 1.0
    assert deadline.timeouts == 1


def test_a_process_that_cannot_serve_says_so(deadline: Deadline) -> None:
    with pytest.raises(DataError, match="not today; come back tomorrow"):
        deadline.call({"do": "refuse"})


def test_a_process_that_does_not_start_says_how_to_see_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    with pytest.raises(VerifierError, match=r"misbehaving did not start .*ended by itself.*-m misbehaving broken"):
        Deadline("misbehaving", "broken").call({})


def test_secrets_the_current_folder_and_ctrl_c_do_not_reach_it(
    deadline: Deadline, monkeypatch: pytest.MonkeyPatch
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
        "import sys; from practicum.tasks._deadline import Deadline\n"
        "deadline = Deadline('misbehaving', seconds=1)\n"
        "print(deadline.ask({'do': 'tell'}, 5.0)['pid'], flush=True)\n"
        f"deadline.ask({{'do': 'hang in C', 'size': 10}}, 1.0) if {busy} else sys.stdin.read()\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(HERE)}
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        time.sleep(0.2)
        parent.kill()
        parent.wait()
        assert gone(pid, 10)


def test_the_end_of_the_interpreter_ends_the_process() -> None:
    script = (
        "from practicum.tasks._deadline import Deadline\n"
        "print(Deadline('misbehaving').ask({'do': 'tell'}, 5.0)['pid'])\n"
        "kept = Deadline('misbehaving')\n"
        "print(kept.ask({'do': 'tell'}, 5.0)['pid'])\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(HERE)}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, env=environment, check=True
    )
    assert not done.stderr
    assert not any(alive(int(pid)) for pid in done.stdout.split())
