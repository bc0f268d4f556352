"""Break a teacher's server in ways that servers have failed, and report what the probe and the run find.

    python -m benchmarks broken_server [--only NAME ...]

The server scores and generates with the recipe's own model and speaks the API of vLLM, on a port of this machine
(`tests/stub_server.py`). Each fault changes its replies, or changes the weights behind its model name.
"""

import math
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.broken import MODEL
from benchmarks.measuring import Session, build_environment, build_parser, format_table
from practicum.models.sources import locate_gguf
from practicum.teaching.probe import build_canary
from tests.stub_server import FolderModel, Stub

TOPK = "objective.signal=topk(20, support=teacher)"
SHORT = (
    "train.steps=3",
    "train.prompts_per_step=2",
    "evaluation.prompts=0",
    "student.trainable_layers=1",
)


FIRST_STEP = 2
"""Questions about completions in the first step, which has as many prompts."""


@dataclass
class Turning(Stub):
    """A server that changes after the first step of a run; questions about the canary do not count."""

    during: Callable[[Stub], None] = lambda server: None
    about: int = 0

    def answer(self, path: str, body: Any) -> tuple[int, Any]:
        """The answer, of the changed server where it is due."""
        canary = build_canary(None).prompt_tokens
        if (
            body is not None
            and "prompt_logprobs" in body
            and tuple(body["prompt"][: len(canary)]) != canary
        ):
            self.about += 1
            if self.about == FIRST_STEP + 1:
                self.during(self)
        return super().answer(path, body)


@dataclass(frozen=True, slots=True)
class Way:
    """A way to break the server: a change before the probe, and a change after a number of requests in the run."""

    before: Callable[[Stub], None] = lambda server: None
    during: Callable[[Stub], None] = lambda server: None
    pinned: bool = False


def score_constant(server: Stub) -> None:
    """Say minus the ln of the vocabulary about every token."""
    server.bend = lambda rows: torch.full_like(rows, -math.log(rows.shape[1]))


def shift_scores(server: Stub) -> None:
    """Return the score of the previous position at each position."""
    server.bend = lambda rows: rows.roll(1, 0)


def change_weights(server: Stub) -> None:
    """Move every weight of the last norm a little, as a further trained checkpoint would have them."""
    norm = server.model.loaded.language_model.model.model.norm.weight
    with torch.no_grad():
        norm.mul_(1 + 0.05 * torch.randn(norm.shape, generator=torch.Generator().manual_seed(0)))


def rename_model(server: Stub) -> None:
    """Answer as another model than was asked for, with the same weights."""
    server.answers_as = "smollm2-135m-instruct-0711"


WAYS = {
    "as it is": Way(),
    "the ln of V for every token": Way(before=score_constant),
    "the ln of V from step 2 on": Way(during=score_constant),
    "off by one position": Way(before=shift_scores),
    "off by one from step 2 on": Way(during=shift_scores),
    "another model under the name, pinned": Way(before=change_weights, pinned=True),
    "another model from step 2 on": Way(during=change_weights),
    "answers by another name from step 2 on": Way(during=rename_model),
}


def main() -> None:
    """Report one line for each way."""
    parser = build_parser(__doc__)
    parser.add_argument("--only", nargs="+", help="some of the ways")
    options = parser.parse_args()
    session = Session(
        "broken_server", options.quick, options.record, command="python -m benchmarks broken_server"
    )
    rows = []
    for name, way in WAYS.items():
        if options.only is None or name in options.only:
            endings = run_broken(way)
            rows.append([name, endings["probe"], endings["run"]])
            session.report(way=name, probe=endings["probe"], run=endings["run"])
    print(format_table(["the server", "the probe", "the run"], rows))


def run_broken(way: Way) -> dict[str, str]:
    """Return the last words of `practicum probe` and of a run, each with its exit code."""
    model = FolderModel(locate_gguf(MODEL))
    with (
        Turning(model, name=MODEL, context=512, answers_as=MODEL, during=way.during) as server,
        tempfile.TemporaryDirectory() as place,
    ):
        pin = f", canary: {_read_canary(server)}" if way.pinned else ""
        way.before(server)
        probe = run_practicum(server, "probe", server.url)
        teacher = f"teacher.teacher={{type: openai_api, url: '{server.url}', canary_every: 1{pin}}}"
        run = run_practicum(server, "run", "products", teacher, TOPK, *SHORT, "--out", place)
        return {"probe": probe, "run": run}


def _read_canary(server: Stub) -> str:
    """The canary that the probe prints."""
    return run_practicum(server, "probe", server.url).rpartition("canary: ")[2].partition(" ")[0]


def run_practicum(server: Stub, *arguments: str) -> str:
    """The last line that a command of this library prints, and its exit code; the port is left out."""
    command = [sys.executable, "-P", "-m", "practicum", *arguments]
    ended = subprocess.run(
        command, capture_output=True, text=True, env=build_environment(), check=False
    )
    lines = (ended.stderr if ended.returncode else ended.stdout).strip().splitlines()
    return f"{lines[-1].replace(server.url, 'http://localhost:8000')} (exit {ended.returncode})"


if __name__ == "__main__":
    main()
