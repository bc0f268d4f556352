"""`practicum probe` reports the capabilities of a server, to people and to machines."""

import json
import re
import socket
import time
from pathlib import Path

import pytest
import yaml
from service import LEFT_OPEN, serving
from stub_server import Stub, table
from typer.testing import CliRunner

from practicum.cli import probe_service
from practicum.cli.app import app
from practicum.cli.probe import find_methods, probe_server
from practicum.errors import RecipeError

pytestmark = pytest.mark.long


@pytest.fixture
def big() -> Stub:
    """Write a model with a vocabulary of realistic size."""
    return Stub(table(2048), most=30)


def test_people_read_a_line_each(big: Stub) -> None:
    with big:
        result = CliRunner().invoke(app, ["probe", big.url])
    facts, block = result.stdout.split("\n\n")
    lines = dict(line.split(": ", 1) for line in facts.splitlines())
    assert result.exit_code == 0
    teacher = yaml.safe_load(block)["teacher"]
    assert teacher == {
        "type": "openai_api",
        "url": big.url,
        "model": "m",
        "dialect": "vllm",
        "largest_k": 30,
    }
    assert lines["model"] == "m"
    assert lines["signals"] == "sampled, topk(k=30, support=teacher) or less"
    assert lines["dialect"] == "vllm; its answers come as token ids"
    assert lines["context"] == "64 tokens, including one that the server must generate"
    assert lines["repeated"] == "differ by 0.0e+00 singly and 0.0e+00 in a batch"
    assert float(lines["canary"]) < 0
    assert lines["start with"].startswith("--max-logprobs K --logprobs-mode raw_logprobs ")
    plain, candidates = re.fullmatch(
        r"([\d,]+) per token for sampled, ([\d,]+) with 30 candidates", lines["bytes"]
    ).groups()
    assert 0 < 10 * int(plain.replace(",", "")) < int(candidates.replace(",", ""))
    assert "cannot: each needs the teacher's signal 'full'" in result.stdout


@LEFT_OPEN
def test_a_service_of_our_own_is_known_with_its_models_and_revisions(
    models: Path, tmp_path: Path
) -> None:
    with serving(models, tmp_path) as served:
        result = CliRunner().invoke(app, ["probe", served.url])
        as_json = json.loads(CliRunner().invoke(app, ["probe", served.url, "--json"]).stdout)
    facts, block = result.stdout.split("\n\n")
    assert result.exit_code == 0 and max(map(len, facts.splitlines())) < 100
    assert facts.startswith("server: practicum ")
    assert "model: teacher\n  revision: written 20" in facts
    assert yaml.safe_load(block)["teacher"] == {
        "type": "tinker",
        "url": served.url,
        "model": "ONE OF THEM",
    }
    assert [model["name"] for model in as_json["models"]] == ["student", "teacher"]


def test_a_server_that_never_answers_ends_the_probe_with_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(probe_service, "FIRST_SECONDS", 0.3)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        start = time.monotonic()
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        result = CliRunner().invoke(app, ["probe", url])
    assert time.monotonic() - start < 8.0 and result.exit_code == 5
    (line,) = [line for line in result.output.splitlines() if line.startswith("error: ")]
    assert "did not begin to answer within 0 s" in line


def test_machines_read_json(big: Stub) -> None:
    with big:
        result = CliRunner().invoke(app, ["probe", big.url, "--json"])
    found = json.loads(result.stdout)
    assert "thinking-machines" in found["methods"]["with_teacher"]
    assert (found["dialect"], found["sampled"], found["largest_k"], found["context"]) == (
        "vllm",
        True,
        30,
        64,
    )


def test_a_server_that_only_writes_is_said_to() -> None:
    with Stub(dialect="llamacpp") as stub:
        found = probe_server(stub.url)
    assert found.signals.startswith("text (it writes answers and does not score")
    allowed = find_methods(found).with_teacher
    assert "seqkd" in allowed and "thinking-machines" not in allowed


def test_an_address_or_a_dialect_that_cannot_be_is_one_line() -> None:
    with pytest.raises(
        RecipeError, match=r"^the address holds a user or a password; .*api_key_env$"
    ):
        probe_server("http://key:secret@localhost")
    with pytest.raises(RecipeError, match="Input should be 'auto', 'vllm'"):
        probe_server("http://localhost:1", dialect="vlm")


def test_nobody_there_is_exit_code_5() -> None:
    with Stub() as stub:
        url = stub.url
    result = CliRunner().invoke(app, ["probe", url, "--debug"])
    assert result.exception is not None and "the list of models failed" in str(result.exception)
    assert CliRunner().invoke(app, ["probe", url]).exit_code == 5
