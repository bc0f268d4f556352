"""`practicum probe` says what a server can give, to people and to machines."""

import json
import re

import pytest
from stub_server import Stub, table
from typer.testing import CliRunner

from practicum.cli.app import app
from practicum.cli.probe import find_methods, probe_server
from practicum.errors import RecipeError

pytestmark = pytest.mark.long


@pytest.fixture
def big() -> Stub:
    """A model with the vocabulary of a real one."""
    return Stub(table(2048), most=30)


def test_people_read_a_line_each(big: Stub) -> None:
    with big:
        result = CliRunner().invoke(app, ["probe", big.url])
    lines = dict(line.split(": ", 1) for line in result.stdout.splitlines())
    assert result.exit_code == 0
    assert lines["model"] == "m"
    assert lines["signals"] == "sampled, topk(k=30, support=teacher) or less"
    assert lines["dialect"] == "vllm; its answers come as token ids"
    assert lines["context"] == "64 tokens, one of which the server must generate"
    assert lines["repeated"] == "differ by 0.0e+00 alone and 0.0e+00 in company"
    assert float(lines["canary"]) < 0
    assert lines["start with"].startswith("--max-logprobs K --logprobs-mode raw_logprobs ")
    plain, candidates = re.fullmatch(
        r"([\d,]+) a token for sampled, ([\d,]+) with 30 candidates", lines["bytes"]
    ).groups()
    assert 0 < 10 * int(plain.replace(",", "")) < int(candidates.replace(",", ""))
    assert "cannot: each needs the teacher's signal 'full'" in result.stdout


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
    assert found.signals.startswith("text (it writes answers and scores none")
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
