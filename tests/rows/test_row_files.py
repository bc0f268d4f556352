"""Files in the formats of other tools are read, or refused with the line to write."""

import csv
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from row_folder import Folder, read_one, write_lines

from practicum.errors import DataError
from practicum.rows import row_files
from practicum.types import Message, Rollout

GSM8K = [
    {
        "question": f"What is {n} plus 1?",
        "answer": f"{n} + 1 = <<{n}+1={n + 1}>>{n + 1}\n#### {n + 1:,}",
    }
    for n in range(1000, 1012)
]


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


# The five ordinary files that a new user tried.


def test_rows_of_gsm8k_are_refused_with_the_line_to_write(folder: Folder) -> None:
    write_lines(folder, GSM8K)
    with pytest.raises(DataError) as refusal:
        folder.task(verifier="number")
    text = str(refusal.value)
    assert "all of its 12 rows are unusable; row 1 is" in text
    assert text.endswith("write columns: {prompt: question} in the task")
    assert text.count("give either prompt") == 1 and "max_rejected" not in text


def test_the_last_number_of_gsm8k_is_the_answer(folder: Folder) -> None:
    write_lines(folder, GSM8K)
    task = folder.task(
        verifier="number",
        columns={"prompt": "question", "privileged.solution": "answer", "answer": "answer"},
    )
    first = task.train_prompts()[0]
    assert first.messages == (Message("user", "What is 1000 plus 1?"),)
    assert first.privileged["solution"] == first.answer
    assert task.reward(Rollout.from_text(first, "It is 1001.")) == 1.0
    assert task.reward(Rollout.from_text(first, "It is 1000.")) == 0.0
    assert folder.said == []


def test_other_columns_are_named_once_and_not_used(folder: Folder) -> None:
    write_lines(
        folder, [{"prompt": "p", "answer": n, "level": 3, "my source\n": "x"} for n in range(9)]
    )
    write_lines(
        folder, [{"prompt": "h", "answer": 1, "level": 3, "my source\n": "x"}], "held.jsonl"
    )
    task = folder.task(heldout="held.jsonl")
    assert len(task.train_prompts()) == 9
    (note,) = folder.said
    assert note.endswith('rows.jsonl: not used: the columns level, "my source\\n"')
    with pytest.raises(
        DataError, match="unknown field 'level'; known: answer, audios, choices, dom"
    ):
        folder.task(strict=True)
    write_lines(folder, [{"promt": "p"}])
    with pytest.raises(DataError, match="unknown field 'promt'; did you mean 'prompt'"):
        folder.task(strict=True)
    with pytest.raises(DataError, match=r"write columns: \{prompt: promt\}"):
        folder.task()


def test_a_column_that_may_hold_the_answers_is_proposed(folder: Folder) -> None:
    read_one(folder, {"prompt": "p", "label": 4, "topic": "t"})
    assert folder.said[0].endswith("no row has an answer; perhaps write columns: {answer: label}")


def test_turns_with_a_solution_are_trls(folder: Folder) -> None:
    prompt = read_one(folder, {"prompt": [{"role": "user", "content": "u"}], "solution": "$2$"})
    assert (prompt.messages, prompt.answer) == ((Message("user", "u"),), "$2$")
    assert folder.said[0].endswith("read as rows of TRL prompt and solution")


def test_a_last_turn_of_the_assistant_is_the_response(folder: Folder) -> None:
    turns = ["user", "assistant", "user", "assistant"]
    messages = [{"role": role, "content": f"{n}", "name": None} for n, role in enumerate(turns)]
    prompt = read_one(folder, {"messages": messages})
    assert [message.content for message in prompt.messages] == ["0", "1", "2"]
    assert prompt.response == "3" and folder.said == []


@pytest.mark.parametrize("ending", ["\r\n", "\n"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_a_csv_file_is_read(folder: Folder, encoding: str, ending: str) -> None:
    with (folder.path / "rows.csv").open("w", encoding=encoding, newline="") as file:
        writer = csv.writer(file, lineterminator=ending)
        writer.writerows(
            [["prompt", "answer", "domain"], ['a "b",\nc', "42", ""], ["d", "", "x"], ["", "", ""]]
        )
    first, second = folder.task(path="rows.csv").train_prompts()
    assert first.messages[0].content == 'a "b",\nc' and (first.answer, first.domain) == ("42", None)
    assert (second.id, second.answer, second.domain) == ("train-2", None, "x")


def test_columns_of_a_csv_file_are_proposed(folder: Folder) -> None:
    (folder.path / "rows.csv").write_text("Problem,Correct Answer,Level\np,4,1\n")
    with pytest.raises(DataError, match=r'columns: \{prompt: Problem, answer: "Correct Answer"\}'):
        folder.task(path="rows.csv")
    columns = {"prompt": "Problem", "answer": "Correct Answer"}
    (prompt,) = folder.task(path="rows.csv", columns=columns).train_prompts()
    assert prompt.answer == "4"


# Forms of rows that other tools document.

KNOWN_FORMS = {
    "verl": {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": "q"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "72"},
        "extra_info": {"split": "train", "index": 0, "answer": "... #### 72", "question": "q"},
    },
    "TRL prompt-completion": {"prompt": "q", "completion": " a"},
    "TRL prompt-completion, turns": {
        "prompt": [{"role": "user", "content": "q"}],
        "completion": [{"role": "assistant", "content": "a"}],
    },
    "ShareGPT": {
        "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}],
        "system": "s",
        "tools": "",
    },
    "Alpaca": {"instruction": "i", "input": "q", "output": "a"},
    "Alpaca, LlamaFactory": {
        "instruction": "i",
        "input": "",
        "output": "a",
        "system": "s",
        "history": [["h", "g"]],
    },
    "": {"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]},
}
SYSTEM, QUESTION = Message("system", "s"), Message("user", "q")
EXPECTED: dict[str, tuple[tuple[Message, ...], str | None, str | None]] = {
    "verl": ((QUESTION,), "72", None),
    "TRL prompt-completion": ((QUESTION,), None, " a"),
    "TRL prompt-completion, turns": ((QUESTION,), None, "a"),
    "ShareGPT": ((SYSTEM, QUESTION), None, "a"),
    "Alpaca": ((Message("user", "i\nq"),), None, "a"),
    "Alpaca, LlamaFactory": (
        (SYSTEM, Message("user", "h"), Message("assistant", "g"), Message("user", "i")),
        None,
        "a",
    ),
    "": ((SYSTEM, QUESTION), None, None),
}


@pytest.mark.parametrize("form", KNOWN_FORMS)
def test_known_forms_are_read_and_named_once(folder: Folder, form: str) -> None:
    write_lines(folder, [KNOWN_FORMS[form], KNOWN_FORMS[form]])
    for prompt in folder.task().train_prompts():
        assert (prompt.messages, prompt.answer, prompt.response) == EXPECTED[form]
        assert prompt.domain == ("openai/gsm8k" if form == "verl" else None)
    name = form.partition(",")[0]
    unused = "; not used: the columns ability, extra_info" if form == "verl" else ""
    notes = [note.partition("rows.jsonl: ")[2] for note in folder.said]
    assert notes == ([f"read as rows of {name}{unused}"] if name else [])


@pytest.mark.parametrize("form", KNOWN_FORMS)
def test_columns_of_the_recipe_go_before_a_known_form(folder: Folder, form: str) -> None:
    row = {**KNOWN_FORMS[form], "mine": "m", "5": 5}
    prompt = read_one(folder, row, columns={"prompt": "mine", "answer": "5"})
    # The system turn has a separate column, which is read under its name.
    system = (SYSTEM,) if "system" in row else ()
    assert (prompt.messages, prompt.answer) == ((*system, Message("user", "m")), "5")
    assert not any("read as" in note for note in folder.said)


def test_a_field_within_a_column_is_named_by_its_path(folder: Folder) -> None:
    columns = {"privileged.solution": "extra_info.answer", "answer": "reward_model.ground_truth"}
    prompt = read_one(folder, KNOWN_FORMS["verl"], columns=columns)
    assert prompt.answer == "72" and prompt.privileged == {"solution": "... #### 72"}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (
            {"conversations": [{"from": "bot", "value": "x"}]},
            "known: system, developer, user, human",
        ),
        ({"instruction": 5, "output": "a"}, "instruction or input is not a text"),
        ({"instruction": "i", "output": "a", "history": ["h"]}, "not a list of pairs"),
        (
            {"prompt": "p", "completion": [{"role": "user", "content": "c"}]},
            "not one turn of the ass",
        ),
        ({"prompt": "[{'role': 'user', 'content': 'x'}]"}, "a text that holds no list of turns"),
        ({"prompt": {"a": 1}}, "prompt is of type dict, not a text"),
    ],
)
def test_what_a_form_does_not_allow_is_refused(
    folder: Folder, row: Mapping[str, Any], reason: str
) -> None:
    with pytest.raises(DataError, match=reason):
        read_one(folder, row)


# Mistakes in `columns`.


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"promt": "a"}, "no field 'promt'; did you mean 'prompt'?"),
        ({"prompt": "a", "messages": "b"}, "either prompt or messages"),
    ],
)
def test_a_field_that_does_not_exist_is_refused(
    folder: Folder, columns: dict[str, str], message: str
) -> None:
    with pytest.raises(ValidationError) as refusal:
        folder.task(columns=columns)
    assert message in str(refusal.value)


def test_a_column_that_no_row_has_is_refused(folder: Folder) -> None:
    row = {"question": "q", "solution": "s"}
    with pytest.raises(DataError, match="no column quetsion, which holds the prompt; did you mean"):
        read_one(folder, row, columns={"prompt": "quetsion"})
    columns = {"prompt": "question", "answer": "label"}
    with pytest.raises(DataError, match=r"no row has the column label.*not used: solution"):
        read_one(folder, row, columns=columns)


def test_a_privileged_column_holds_texts(folder: Folder) -> None:
    columns = {"privileged.hint": "hint"}
    assert read_one(folder, {"prompt": "p", "hint": 5}, columns=columns).privileged == {"hint": "5"}
    with pytest.raises(DataError, match=r"column hint is not a text, as privileged.hint is"):
        read_one(folder, {"prompt": "p", "hint": ["h"]}, columns=columns)


# Kinds of files.


@pytest.mark.parametrize(("answer", "text"), [(3, "3"), (3.0, "3"), (2.5, "2.5"), (None, None)])
def test_numbers_are_answers(folder: Folder, answer: object, text: str | None) -> None:
    assert read_one(folder, {"prompt": "p", "answer": answer, "id": 7}).answer == text


def test_a_json_list_and_json_lines_may_have_one_suffix(folder: Folder) -> None:
    rows = [{"prompt": f"p{n}", "answer": n} for n in range(3)]
    (folder.path / "list.json").write_bytes(b"\xef\xbb\xbf" + json.dumps(rows, indent=1).encode())
    write_lines(folder, rows, "lines.json")
    both = [folder.task(path=name).train_prompts() for name in ("list.json", "lines.json")]
    assert both[0] == both[1] and len(both[0]) == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "no rows"),
        ("[{}", "no comma or bracket follows row 1"),
        ("[5]", "row 1: not an object but of type int"),
        ('[{"prompt": "a"},]', "row 2 is not JSON"),
        ('[{"prompt": "a"}] x', "more text follows the list"),
        ('[{"prompt": "a", "prompt": "b"}]', r"row 1: not JSON \(field 'prompt' stands twice"),
        ("[" * 100_000, r"row 1 is not JSON \(nested deeper than 20"),
        ('[{"prompt": "a"', "row 1 is not JSON"),
        ("[", "row 1 is not JSON"),
    ],
)
def test_a_broken_list_is_refused(folder: Folder, text: str, message: str) -> None:
    (folder.path / "rows.json").write_text(text)
    with pytest.raises(DataError, match=message):
        folder.task(path="rows.json")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no rows"),
        (b"prompt,answer\n", "no rows"),
        (b"prompt,answer,prompt\na,b,c\n", "the column 'prompt' stands twice"),
        (b'prompt,answer\n"a,b\nc,d\n', r"is not CSV \(unexpected end of data\)"),
        (b"prompt,answer\na,b,c\n", "has 3 cells, and the header has 2"),
        (b"prompt\n\xe9\n", "is not UTF-8"),
        (b"prompt\n" + b"a" * 2000 + b"\n", r"field larger than field limit \(1000\)"),
        (b"prompt\n\"[{'role': 'user', 'content': 'x'}]\"\n", "a text that holds no list of turns"),
        (b"PK\x03\x04", "is a zip file"),
    ],
)
def test_a_broken_table_is_refused(folder: Folder, content: bytes, message: str) -> None:
    (folder.path / "rows.csv").write_bytes(content)
    limit = csv.field_size_limit()
    with pytest.raises(DataError, match=message):
        folder.task(path="rows.csv", max_row_bytes=1000)
    assert csv.field_size_limit() == limit


@pytest.mark.parametrize(("name", "separator"), [("rows.csv", ";"), ("rows.tsv", "\t")])
def test_other_separators_are_read(folder: Folder, name: str, separator: str) -> None:
    (folder.path / name).write_text(separator.join(["prompt", "answer"]) + f'\n"a, b"{separator}2')
    (prompt,) = folder.task(path=name).train_prompts()
    assert (prompt.messages[0].content, prompt.answer) == ("a, b", "2")


def test_several_files_are_read_in_order(folder: Folder) -> None:
    write_lines(folder, [{"prompt": "a"}, {"prompt": "b"}], "one.jsonl")
    (folder.path / "two.csv").write_text("question\nc\n")
    write_lines(folder, [{"id": "train-1", "prompt": "d"}], "three.jsonl")
    with pytest.raises(
        DataError, match=r"two.csv: all of its .*write columns: \{prompt: question\}"
    ):
        folder.task(path=["one.jsonl", "two.csv"])
    (folder.path / "two.csv").write_text("prompt\nc\n")
    prompts = folder.task(path=["one.jsonl", "two.csv"]).train_prompts()
    assert [prompt.id for prompt in prompts] == ["train-1", "train-2", "train-2-1"]
    with pytest.raises(DataError, match=r"three.jsonl: all of its .*id 'train-1' was used before"):
        folder.task(path=["one.jsonl", "three.jsonl"])


# Parquet, and tables that other packages write.

ROWS = [{"prompt": "a", "answer": 1}, {"prompt": "b\n", "answer": None}]


def test_tables_of_pandas_are_read(folder: Folder) -> None:
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame(ROWS)
    table.to_csv(folder.path / "rows.csv")
    table.to_json(folder.path / "rows.json", orient="records")
    table.to_json(folder.path / "rows.jsonl", orient="records", lines=True)
    table.to_parquet(folder.path / "rows.parquet")
    for name in ("rows.csv", "rows.json", "rows.jsonl", "rows.parquet"):
        first, second = folder.task(path=name).train_prompts()
        assert first.answer is not None and float(first.answer) == 1.0
        assert (second.messages[0].content, second.answer) == ("b\n", None)


def test_parquet_files_of_verl_are_read(folder: Folder) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [{**KNOWN_FORMS["verl"], "extra_info": {"index": n}} for n in range(3)]
    datasets.Dataset.from_list(rows).to_parquet(folder.path / "rows.parquet")
    prompts = folder.task(path="rows.parquet", verifier="number").train_prompts()
    assert [prompt.answer for prompt in prompts] == ["72"] * 3


def test_broken_parquet_files_are_refused(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyarrow")
    (folder.path / "rows.parquet").write_bytes(b"PAR1" + bytes(100))
    with pytest.raises(DataError, match="is not Parquet that can be read"):
        folder.task(path="rows.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(
        DataError,
        match=r"needs the package pyarrow; in the checkout of practicum, run: pip install -e '\.\[d",
    ):
        folder.task(path="rows.parquet")


def test_a_large_list_is_refused(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_files, "HOPELESS_LIST", 10)
    (folder.path / "rows.json").write_text(json.dumps(ROWS))
    with pytest.raises(DataError, match="write one JSON object a line instead"):
        folder.task(path="rows.json")
