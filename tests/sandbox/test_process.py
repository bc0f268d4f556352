"""A hostile program in the sandbox can only compute."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from practicum.errors import SandboxError
from practicum.sandbox import NoLine, ProcessLimits, Sandbox, SandboxedProcess, missing
from practicum.sandbox.imports import find_places, list_python_folders
from practicum.sandbox.syscalls import ALLOWED, build_filter, is_known

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        bool(missing()), reason=f"this machine cannot wall off {'; '.join(missing())}"
    ),
]

TRIES = {
    "read another's file": "open(SECRET).read()",
    "list a folder": "os.listdir(os.path.dirname(SECRET))",
    "read a system file": "open('/etc/passwd').read()",
    "read a process": "open(f'/proc/{RUN}/environ').read()",
    "read itself": "open('/proc/self/environ').read()",
    "write a file": "open(SECRET, 'w')",
    "empty a file": "os.truncate(SECRET, 0)",
    "remove a file": "os.remove(SECRET)",
    "rename a file": "os.rename(SECRET, SECRET + '2')",
    "change rights": "os.chmod(SECRET, 0o777)",
    "change times": "os.utime(SECRET)",
    "link": "os.link(SECRET, 'x')",
    "make a folder": "os.mkdir('x')",
    "write at home": "open('x', 'w')",
    "write to a package": "open(os.__file__, 'a')",
    "open a socket": "socket.socket()",
    "open a local socket": "socket.socket(socket.AF_UNIX)",
    "fork": "os.fork()",
    "run": "subprocess.run(['/bin/true'])",
    "spawn": "os.posix_spawn('/bin/true', ['true'], {})",
    "leave the session": "os.setsid()",
    "leave the group": "os.setpgid(0, 0)",
    "kill the run": "os.kill(RUN, 9)",
    "kill its keeper": "os.kill(os.getppid(), 9)",
    "kill everything": "os.kill(-1, 9)",
    "have the run signalled": "fcntl.fcntl(0, fcntl.F_SETOWN, RUN)",
    "limit the run": "resource.prlimit(RUN, resource.RLIMIT_CPU, (1, 1))",
    "raise a limit": "resource.setrlimit(resource.RLIMIT_NOFILE, (10**6, 10**6))",
    "be another user": "os.setuid(12345)",
    "take too much memory": "bytearray(1 << 33)",
    "trace the run": "check(libc.ptrace(16, RUN, 0, 0))",
    "outlive its keeper": "check(libc.prctl(1, 0, 0, 0, 0))",
    "leave its names": "check(libc.unshare(0x10000000))",
    "make memory that is a file": "os.memfd_create('x')",
    "use io_uring": "check(libc.syscall(425, 1, bytes(120)))",
    "use a call of x32": "check(libc.syscall(999, 0))",
}
TRIER = """
import ctypes, fcntl, json, os, resource, socket, subprocess, sys, threading
libc = ctypes.CDLL(None, use_errno=True)
RUN, SECRET, TRIES = json.loads(sys.argv[1])
def check(answer):
    if answer < 0: raise OSError(ctypes.get_errno(), "refused")
def attempt(code):
    try: eval(code)
    except (OSError, ValueError, MemoryError) as error: return type(error).__name__
    return "done"
outcomes = {name: attempt(code) for name, code in TRIES.items()}
thread = threading.Thread(target=outcomes.__setitem__, args=("thread", "done"))
thread.start()
thread.join()
outcomes["home"] = os.listdir(os.path.expanduser("~"))
outcomes["environment"] = sorted(os.environ)
outcomes["descriptors"] = [number for number in range(256) if attempt(f"os.fstat({number})") == "done"]
outcomes["pid"] = os.getpid()
print(json.dumps(outcomes), flush=True)
for line in sys.stdin: print(line, end="", flush=True)
"""


def start(code: str, *arguments: str, sandbox: Sandbox | None = None) -> SandboxedProcess:
    return (sandbox or Sandbox()).start(
        [sys.executable, "-I", "-c", code, *arguments], {"GIVEN": "yes"}
    )


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    secret = tmp_path_factory.mktemp("home") / "secret"
    secret.write_text("hush")
    process = start(TRIER, json.dumps([os.getpid(), str(secret), TRIES]))
    answer = json.loads(process.receive(60, 1 << 20))
    process.close()
    assert secret.read_text() == "hush"
    return answer


@pytest.mark.parametrize("what", TRIES)
def test_it_cannot(outcomes: dict[str, Any], what: str) -> None:
    assert outcomes[what] in (
        "OSError",
        "PermissionError",
        "MemoryError",
        "ValueError",
        "FileExistsError",
    )


def test_it_has_threads_an_empty_home_and_what_it_was_given(outcomes: dict[str, Any]) -> None:
    assert outcomes["thread"] == "done"
    assert outcomes["home"] == []
    assert set(outcomes["environment"]) <= {"GIVEN", "HOME", "TMPDIR", "LC_CTYPE"}
    assert outcomes["descriptors"] == [0, 1, 2]


def gone(pid: int, seconds: float = 10) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):  # ended before opening, or before reading
            return True
        time.sleep(0.05)
    return False


ECHO = """
import os, sys
print(os.getpid(), os.path.expanduser("~"), flush=True)
for line in sys.stdin: print(line, end="", flush=True)
"""


def test_lines_go_both_ways_and_nothing_is_left_of_it() -> None:
    process = start(ECHO)
    pid, home = process.receive(60, 1000).split()
    for line in (b"one", b"two", b"x" * (1 << 20)):
        process.send(line, 10)
        assert process.receive(10, 1 << 21) == line
    assert process.is_idle()
    process.close()
    assert gone(int(pid), 0.1)
    assert not Path(home.decode()).exists()
    process.close()


def test_what_is_late_long_or_more_than_one_line_is_no_line() -> None:
    process = start(ECHO)
    process.receive(60, 1000)
    with pytest.raises(NoLine, match=r"over 0.1 s"):
        process.receive(0.1, 1000)
    process.send(b"a\nb", 10)
    time.sleep(0.3)
    with pytest.raises(NoLine, match="more than one line"):
        process.receive(10, 1000)
    process.send(b"x" * 100, 10)
    with pytest.raises(NoLine, match="more than 50 bytes"):
        process.receive(10, 50)
    process.close()


def test_a_process_that_ends_or_does_not_read_is_no_longer_talked_to() -> None:
    process = start("import sys; sys.stdin.readline(); sys.exit(3)")
    process.send(b"end", 10)
    with pytest.raises(NoLine, match="ended by itself"):
        process.receive(60, 1000)
    process.close()
    process = start("import time; time.sleep(60)")
    with pytest.raises(NoLine, match=r"over 0.2 s"):
        process.send(b"x" * (1 << 20), 0.2)
    process.close()


def test_it_dies_with_a_run_that_is_killed_and_with_its_keeper() -> None:
    script = (
        "import sys, time; from practicum.sandbox import Sandbox\n"
        "code = 'import os, time; print(os.getpid(), os.getppid(), flush=True); time.sleep(60)'\n"
        "process = Sandbox().start([sys.executable, '-I', '-c', code])\n"
        "print(process.receive(60, 1000).decode(), flush=True); time.sleep(60)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    for which in (0, 1):
        with subprocess.Popen(
            [sys.executable, "-c", script], stdout=subprocess.PIPE, env=environment
        ) as run:
            assert run.stdout is not None
            pid, keeper = (int(number) for number in run.stdout.readline().split())
            os.kill((run.pid, keeper)[which], 9)
            assert gone(pid) and gone(keeper)
            run.kill()


def test_the_memory_is_what_it_is_given() -> None:
    code = "print(len(bytearray(1 << 28)), flush=True)"
    process = start(code, sandbox=Sandbox(ProcessLimits(memory=1 << 30)))
    assert process.receive(60, 1000) == str(1 << 28).encode()
    process.close()
    process = start(code, sandbox=Sandbox(ProcessLimits(memory=1 << 27)))
    with pytest.raises(NoLine, match="ended by itself"):
        process.receive(60, 1000)
    process.close()


def test_what_cannot_be_walled_off_or_started_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SandboxError, match=r"the sandbox did not start: .*No such file"):
        Sandbox().start(["/nowhere/python"])
    monkeypatch.setattr("practicum.sandbox.process.missing", lambda: ["files (no Landlock)"])
    with pytest.raises(SandboxError, match=r"this machine cannot wall off files \(no Landlock\)"):
        start(ECHO)
    process = start(ECHO, sandbox=Sandbox(required=False))
    process.receive(60, 1000)
    process.close()


def test_only_pythons_own_folders_are_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "packages").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    paths = os.pathsep.join([str(tmp_path), str(tmp_path / "packages"), "relative", ""])
    folders = set(list_python_folders({"PYTHONPATH": paths, "LD_LIBRARY_PATH": str(tmp_path)}))
    assert not any(Path(folder).is_relative_to(tmp_path) for folder in folders)
    assert not {str(tmp_path.parent), "/", "/usr", str(Path(__file__).parents[2])} & folders
    assert str(Path(os.__file__).parent) in folders


def test_a_users_module_is_found_with_what_it_imports_and_nothing_else(tmp_path: Path) -> None:
    for name, text in {
        "check.py": "import helper, json\nfrom package.deep import x\n",
        "helper.py": "def f():\n    import check, unknown_module\n",
        "package/__init__.py": "from . import deep\n",
        "package/deep.py": "import numpy\n",
        "package/broken.py": "def",
        "other.py": "",
        ".env": "KEY=1",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    places = find_places(("check.verify",), (str(tmp_path),))
    assert {name: place for name, place in places.items() if name != "practicum"} == {
        name: str(tmp_path / place)
        for name, place in {
            "check": "check.py",
            "helper": "helper.py",
            "package": "package",
        }.items()
    }


FLOOD = """
import sys, time
while True:
    sys.stdout.write("x" * 4096); sys.stdout.flush()
"""


def test_bytes_that_flow_do_not_stop_the_clock() -> None:
    process = start(FLOOD)
    began = time.monotonic()
    with pytest.raises(NoLine, match=r"over 0\.5 s"):
        process.receive(0.5, 1 << 40)
    assert time.monotonic() - began < 2
    process.close()


BURN = """
import os, sys, threading, time
def burn():
    while True: pass
print(os.getpid(), flush=True)
for line in sys.stdin:
    for _ in range(3): threading.Thread(target=burn, daemon=True).start()
    print("left", flush=True)
    if line == "stay\\n": time.sleep(60)
"""


def processor(pid: int) -> float:
    """Return the seconds of processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_threads_stop_between_calls_and_a_call_has_a_limit_of_processor_time() -> None:
    process = start(BURN)
    pid = int(process.receive(60, 1000))
    process.send(b"leave", 10)
    assert process.receive(10, 1000) == b"left"
    process.pause()
    time.sleep(0.3)
    used = processor(pid)
    time.sleep(0.7)
    assert processor(pid) == used, "a stopped process computes nothing"
    process.resume(0.5)
    process.send(b"stay", 10)
    assert process.receive(10, 1000) == b"left"
    with pytest.raises(NoLine, match="ended by itself"):
        process.receive(60, 1000)
    assert gone(pid)
    process.close()


def test_machines_that_are_listed_have_a_filter() -> None:
    assert [is_known(machine) for machine in ("x86_64", "aarch64", "riscv64")] == [
        True,
        True,
        False,
    ]
    for machine, column in (("x86_64", 0), ("aarch64", 1)):
        numbers = [numbers[column] for numbers in ALLOWED.values() if numbers[column] is not None]
        assert len(set(numbers)) == len(numbers)
        assert len(build_filter(machine, 1)) % 8 == 0
