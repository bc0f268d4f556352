"""SkyRL itself as the service that trains the student: it behaves as docs/skyrl.md describes.

`PRACTICUM_SKYRL` names an environment of Python 3.12 that has SkyRL; it needs another version of
the tinker package than practicum, so the server runs there and its client here.
"""

import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import recording
from service import LEFT_OPEN
from toy import curve, make_model, toy_run

from practicum.errors import CapabilityError, PracticumError

PLACE = os.environ.get("PRACTICUM_SKYRL", "")
pytestmark = [
    LEFT_OPEN,
    pytest.mark.slow,
    pytest.mark.skipif(not PLACE, reason="PRACTICUM_SKYRL names no environment with SkyRL"),
]
START_SECONDS = 240
COMMAND = "PRACTICUM_SKYRL=ENVIRONMENT pytest -n 0 -m slow tests/peers/test_skyrl.py"
RESULTS: dict[str, Any] = {}
FIXED = {"fixed": ["max_grad_norm"], "seed_bits": 31}
FROM_TEACHER = {
    "rollout.source": "teacher",
    "objective": {"signal": "sampled", "divergence": "reverse_kl"},
    "train.steps": 3,
    "train.prompts_per_step": 4,
    "evaluation.prompts": 0,
}


@pytest.fixture(scope="module", autouse=True)
def record() -> Iterator[None]:
    yield from recording.record("skyrl", find_version(), RESULTS, COMMAND)


def find_version() -> str:
    script = "from importlib.metadata import version; print(version('skyrl'))"
    return subprocess.check_output([f"{PLACE}/bin/python", "-c", script], text=True).strip()


@dataclass(frozen=True, slots=True)
class Server:
    models: Path
    url: str

    def changes(self, backend: dict[str, Any], **more: Any) -> dict[str, Any]:
        place = {"type": "tinker", "url": self.url, **backend}
        return {"student.lora": {"rank": 4}, "backend": place, **FROM_TEACHER, **more}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Start the server as in docs/skyrl.md."""
    folder = tmp_path_factory.mktemp("skyrl")
    models = folder / "models"
    make_model(models / "student", seed=1, architecture="qwen3")
    make_model(models / "teacher", seed=2, architecture="qwen3", pretrain=60)
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
    command = [
        *(f"{PLACE}/bin/uv", "run", "--no-project", "--active", "-m", "skyrl.tinker.api"),
        *("--base-model", str(models / "student"), "--backend", "jax", "--port", str(port)),
        *("--backend-config", '{"max_lora_adapters": 32, "max_lora_rank": 8}'),
        *("--database-url", f"sqlite:///{folder}/skyrl.db"),
        *("--checkpoints-base", str(folder / "checkpoints")),
    ]
    settings = {
        "VIRTUAL_ENV": PLACE,
        "JAX_PLATFORMS": "cpu",
        "PATH": f"{PLACE}/bin:{os.environ['PATH']}",
        "HF_HUB_OFFLINE": "1",
        "HOME": os.environ.get("HOME", "/"),
    }
    with (folder / "said").open("w") as said:
        process = subprocess.Popen(
            command, cwd=folder, env=settings, stdout=said, stderr=said, start_new_session=True
        )
    try:
        await_answer(f"http://127.0.0.1:{port}/api/v1/healthz", process, folder / "said")
        yield Server(models, f"http://127.0.0.1:{port}")
    finally:
        # The server starts another process, which outlives a signal to only the server.
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def await_answer(url: str, process: subprocess.Popen[bytes], said: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        assert process.poll() is None, said.read_text()
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except (urllib.error.URLError, OSError):
            time.sleep(1)
    raise AssertionError(f"no answer in {START_SECONDS} s: {said.read_text()[-4000:]}")


def test_it_trains_on_the_text_of_a_teacher_that_is_here(server: Server, tmp_path: Path) -> None:
    changes = server.changes(FIXED)
    folder = toy_run(server.models, tmp_path, changes).folder
    losses, norms = curve(folder, "loss"), curve(folder, "grad_norm")
    assert losses[-1] < losses[0]
    RESULTS["rollout.source: teacher"] = {
        "loss": [round(loss, 4) for loss in losses],
        "skyrl.ai/grad_norm": [float(f"{norm:.3g}") for norm in norms],
    }


@pytest.mark.parametrize(
    ("name", "backend", "changes", "error", "line"),
    [
        (
            "the trial of optimizer settings",
            {"seed_bits": 31},
            {},
            CapabilityError,
            "ignores optimizer settings: max_grad_norm; ",
        ),
        (
            "two targets a token",
            FIXED,
            {"objective": {"signal": "topk(4)"}},
            CapabilityError,
            "two targets .* set signal: sampled",
        ),
        (
            "seeds of 63 bits",
            {"fixed": ["max_grad_norm"]},
            {"rollout.source": "student"},
            PracticumError,
            "int32",
        ),
    ],
    ids=["settings", "targets", "seeds"],
)
def test_what_it_would_ignore_is_refused_before_the_first_step(
    server: Server,
    tmp_path: Path,
    name: str,
    backend: dict[str, Any],
    changes: dict[str, Any],
    error: type[PracticumError],
    line: str,
) -> None:
    with pytest.raises(error, match=line) as refusal:
        toy_run(server.models, tmp_path, server.changes(backend, **changes))
    assert "\n" not in str(refusal.value)
    assert (
        not (tmp_path / "toy" / "metrics.jsonl").exists()
        or not (tmp_path / "toy" / "metrics.jsonl").read_text()
    )
    RESULTS[name] = str(refusal.value).replace(server.url, "URL")


def test_answers_of_the_student_have_no_numbers_that_the_client_asserts(
    server: Server, tmp_path: Path
) -> None:
    """With a client that accepts them the student's own answers could be learned from."""
    changes = server.changes(FIXED, **{"rollout.source": "student"})
    with pytest.raises(PracticumError, match="sample_sequence_ids") as refusal:
        toy_run(server.models, tmp_path, changes)
    RESULTS["rollout.source: student"] = str(refusal.value).replace(server.url, "URL")


def test_optimizer_settings_are_fixed_in_its_other_backend() -> None:
    """Check the source: FSDP and Megatron need a GPU, so a run cannot show that they only follow a learning rate."""
    (source,) = Path(PLACE).glob("lib/python3*/site-packages/skyrl/backends/skyrl_train_backend.py")
    step = source.read_text().partition("def optim_step")[2].partition("\n    def ")[0]
    assert "set_lr(" in step
    used = [name for name in ("beta1", "beta2", "eps", "weight_decay") if f".{name}" in step]
    assert used == []
    RESULTS["settings that FSDP and Megatron follow"] = ["learning_rate"]
