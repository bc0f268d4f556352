import gzip
import json
import os
import re
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from row_folder import Folder

from practicum.errors import DataError
from practicum.ports import TaskContext
from practicum.rows import row_files
from practicum.rows.fields import read_prompt
from practicum.rows.strict import Rejected, parse_line
from practicum.tasks.jsonl import Config, build
from practicum.types import Message, Rollout

GOOD = b'{"prompt": "a", "answer": "b"}'


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def rows(count: int) -> list[bytes]:
    return [
        json.dumps({"prompt": f"question {number}", "answer": number}).encode()
        for number in range(count)
    ]


def test_every_field_arrives(folder: Folder) -> None:
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": "\u202e\u4f60\u200d\U0001f600e\u0301"},
    ]
    row = {
        "id": "x",
        "messages": messages,
        "answer": 2.5,
        "domain": "d",
        "teacher": "t",
        "privileged": {"hint": "h"},
    }
    row["response"] = "1 + 1.5 is 2.5"
    folder.write(json.dumps(row).encode(), b'{"prompt": "p", "answer": null}')
    first, second = folder.task().train_prompts()
    assert (first.id, first.answer, first.domain, first.teacher) == ("x", "2.5", "d", "t")
    assert first.messages == tuple(Message(turn["role"], turn["content"]) for turn in messages)
    assert dict(first.privileged) == {"hint": "h"}
    assert first.response == "1 + 1.5 is 2.5" and second.response is None
    assert (second.id, second.answer, second.messages) == ("train-2", None, (Message("user", "p"),))
    assert folder.task().reward(Rollout.from_text(second, "anything")) is None
    assert folder.task().reward(Rollout.from_text(first, "2.5")) == 1.0


def test_marks_line_ends_and_blank_lines_of_other_editors_are_fine(folder: Folder) -> None:
    text = b"\xef\xbb\xbf" + GOOD + b"\r\n\r\n   \n" + b'{"prompt": "c"}'
    (folder.path / "rows.jsonl").write_bytes(text)
    assert [prompt.id for prompt in folder.task().train_prompts()] == ["train-1", "train-4"]
    assert not (folder.path / "rejected.jsonl").exists()


BAD = [
    (b'{"prompt": "a",}', "not JSON"),
    (b'{"prompt": "a"', "not JSON"),
    (b"prompt: a", "not JSON"),
    (b'["a"]', "not an object but of type list; write one JSON object a row"),
    (b'"a"', "not an object but of type str"),
    (b'{"prompt": "a", "prompt": "b"}', "field 'prompt' stands twice"),
    (b'{"prompt": "a", "privileged": {"k": "a", "k": "b"}}', "field 'k' stands twice"),
    (b'{"prompt": "a", "answer": NaN}', "NaN is not a number that JSON knows"),
    (b'{"prompt": "a", "answer": -Infinity}', "-Infinity is not a number"),
    (b'{"prompt": "a", "answer": 1e999}', "1e999 is too large for a number; write it as a text"),
    (b'{"prompt": "a", "answer": ' + b"9" * 5000 + b"}", "not JSON .*digits"),
    (b'{"prompt": "a", "answer": true}', "answer is of type bool, not a text or a number"),
    (b'{"prompt": "a", "answer": ["b", "c"]}', "answer is a list of 2; write one text or number"),
    (b'{"prompt": "a", "answer": [["b"]]}', "answer is of type list, not a text or a number"),
    (
        b'{"prompt": "a", "answer": " "}',
        "answer is empty; leave the field out if a row has no answer",
    ),
    (b'{"prompt": 5}', "prompt is of type int, not a text"),
    (b'{"prompt": " "}', "prompt is empty"),
    (b'{"answer": "b"}', "give either prompt or messages"),
    (b'{"prompt": "a", "messages": []}', "give either prompt or messages, not both"),
    (b'{"prompt": "a", "id": 5.5}', "id is of type float, not a text"),
    (b'{"prompt": "a", "id": ""}', "id is empty; leave it out or give it a text"),
    (b'{"prompt": "a", "domain": [5]}', "domain is of type list, not a text"),
    (b'{"prompt": "a", "privileged": {"k": 5}}', "privileged is not an object of texts"),
    (b'{"prompt": "a", "privileged": "k"}', "privileged is not an object of texts"),
    (b'{"messages": []}', "messages is not a list of turns"),
    (b'{"messages": 5}', "messages is not a list of turns"),
    (b'{"messages": "a"}', "messages is not JSON .*: it is a text that holds no list of turns"),
    (b'{"messages": "[] {"}', "messages is not JSON .*it is a text that holds no list of turns"),
    (b'{"messages": "{}"}', "messages is not a list of turns"),
    (b'{"messages": [{"role": "user"}]}', r"messages\[0\] is not an object with role and content"),
    (b'{"messages": [{"role": "user", "content": 5}]}', r"messages\[0\].content is not a text"),
    (
        b'{"messages": [{"role": "bot", "content": "a"}]}',
        r"messages\[0\].role is 'bot'; known: system, developer, user, human, ass",
    ),
    (b'{"messages": [{"role": "user", "content": ""}]}', "the last turn is empty"),
    (
        b'{"messages": [{"role": "assistant", "content": "a"}]}',
        "do not alternate, beginning with user",
    ),
    (
        b'{"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "a"}]}',
        "do not alternate",
    ),
    (b'{"messages": [{"role": "system", "content": "a"}]}', "do not alternate"),
    (
        b'{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],'
        b' "response": "c"}',
        "the last turn is the assistant's, and response is given; leave one out",
    ),
    (
        b'{"messages": [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]}',
        "put it first",
    ),
    (b'{"prompt": "\xff"}', r"not UTF-8 \(byte 12\)"),
    (b'{"prompt": "\xed\xa0\x80"}', "not UTF-8"),
    (b'{"prompt": "\\ud800"}', "prompt contains half of a surrogate pair"),
    (
        b'{"prompt": "a", "privileged": {"\\udc00": "b"}}',
        "privileged contains half of a surrogate pair",
    ),
    (b'{"prompt": "a\\u0000"}', "prompt contains a NUL character"),
    (b'{"prompt": "a\x00"}', "not JSON .Invalid control character"),
    (b'{"prompt": "a", "privileged": ' + b'{"k":' * 20 + b"1" + b"}" * 21, "nested deeper than 20"),
    (b"[" * 900_000, "nested deeper than 20"),
    (
        b'{"prompt": "' + b"a" * (5 << 20) + b'"}',
        "larger than 1048576 bytes; raise task.max_row_bytes",
    ),
]


@pytest.mark.parametrize(("row", "reason"), BAD, ids=range(len(BAD)))
def test_a_bad_row_is_rejected_with_its_number_and_reason(
    folder: Folder, row: bytes, reason: str
) -> None:
    folder.write(GOOD, row, b'{"prompt": "c"}')
    assert [prompt.id for prompt in folder.task(max_rejected=0.5).train_prompts()] == [
        "train-1",
        "train-3",
    ]
    (written,) = folder.rejected()
    assert written["row"] == 2
    assert written["file"] == str(folder.path / "rows.jsonl")
    assert re.search(reason, written["reason"])
    assert row.decode("utf-8", errors="replace").startswith(written["text"][:50])
    assert len(written["text"]) <= 120
    assert len(folder.said) == 1
    assert "1 of 3 rows rejected (row 2: " in folder.said[0]


def test_brackets_inside_texts_are_not_nesting() -> None:
    row = json.dumps({"prompt": '"[' * 50 + "\\"}).encode()
    columns = parse_line(row, 1000)
    assert not isinstance(columns, Rejected)
    assert read_prompt(columns, "x").messages[0].content == '"[' * 50 + "\\"


@given(
    st.binary(max_size=60)
    | st.recursive(st.none() | st.booleans() | st.floats() | st.text(), st.lists).map(
        lambda value: json.dumps({"prompt": value}).encode()
    )
)
def test_whatever_the_bytes_a_row_is_taken_or_rejected(line: bytes) -> None:
    columns = parse_line(line, 1000)
    if not isinstance(columns, Rejected):
        with suppress(Rejected):
            assert read_prompt(columns, "name").id == "name"


def test_the_counts_add_up_and_the_order_stays(folder: Folder) -> None:
    good, bad = rows(90), [row for row, _ in BAD[:30]]
    mixed = [
        row for group in zip(good[:30], bad, good[30:60], good[60:], strict=True) for row in group
    ]
    folder.write(*mixed)
    task = folder.task(max_rejected=0.25)
    assert len(task.train_prompts()) == 90
    assert [entry["row"] for entry in folder.rejected()] == list(range(2, 121, 4))
    assert "30 of 120 rows rejected" in folder.said[0]
    folder.task(max_rejected=0.25)
    assert len(folder.rejected()) == 30


def test_too_many_bad_rows_end_the_run(folder: Folder) -> None:
    folder.write(*rows(99), b"x")
    assert len(folder.task().train_prompts()) == 99
    folder.write(*rows(98), b"{}", b"x", b"y", b"z")
    expected = r"rows.jsonl: 4 of 102 rows cannot be used; row 99 is {}: give either prompt or messages; fix them"
    with pytest.raises(DataError, match=expected):
        folder.task()
    with pytest.raises(DataError, match=r"raise task.max_rejected, which is 0\.01"):
        folder.task()


def test_an_id_is_used_once(folder: Folder) -> None:
    folder.write(b'{"id": "a", "prompt": "a"}', b'{"id": "a", "prompt": "b"}')
    assert len(folder.task(max_rejected=0.5).train_prompts()) == 1
    assert folder.rejected()[0]["reason"] == "id 'a' was used before"


def test_an_answer_must_suit_the_verifier(folder: Folder) -> None:
    folder.write(GOOD)
    with pytest.raises(
        DataError, match="answer 'b' is not one number, which the verifier 'number' compares"
    ):
        folder.task(verifier="number")


@pytest.mark.parametrize("text", [b"", b"\n\n", b"\xef\xbb\xbf"])
def test_a_file_without_rows_is_refused(folder: Folder, text: bytes) -> None:
    (folder.path / "rows.jsonl").write_bytes(text)
    with pytest.raises(
        DataError, match=r'rows.jsonl: no rows; write one row per line, for example {"prompt"'
    ):
        folder.task()


def test_what_is_no_file_of_rows_is_refused(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder.path / "folder").mkdir()
    os.mkfifo(folder.path / "pipe")
    (folder.path / "rows.gz").write_bytes(gzip.compress(bytes(1 << 20)))
    folder.write(b"PAR1\x15", name="table.jsonl")
    with (folder.path / "sparse").open("wb") as file:
        file.truncate(1 << 40)
    for name, message in [
        (
            "missing",
            r"missing cannot be read \(No such file or directory\); check the path, which starts at the recipe",
        ),
        ("folder", "folder is a folder; give a file, or write task.type: datasets"),
        ("pipe", "pipe is not a regular file; give a file of rows"),
        ("rows.gz", "rows.gz is a gzip file, which is not read; unpack it first"),
        ("table.jsonl", "table.jsonl is a parquet file; end its name in .parquet"),
        ("sparse", "sparse has a row of over 64 MiB; give JSON Lines, one object a line"),
    ]:
        with pytest.raises(DataError, match=message):
            folder.task(path=name)
    folder.write(GOOD)

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(DataError, match=r"rows.jsonl cannot be read \(Permission denied\)"):
        folder.task()


def test_a_long_row_does_not_fill_the_memory(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_files, "HOPELESS_ROW", 1000)
    folder.write(b'{"prompt": "' + b"a" * 900 + b'"}', GOOD)
    assert len(folder.task(max_row_bytes=100, max_rejected=0.5).train_prompts()) == 1
    exact = json.dumps({"prompt": "a" * 86}).encode()
    assert len(exact) == 100
    folder.write(exact)
    assert len(folder.task(max_row_bytes=100).train_prompts()) == 1
    with pytest.raises(DataError, match="larger than 99 bytes"):
        folder.task(max_row_bytes=99)


@pytest.mark.parametrize(
    ("heldout", "least", "most"),
    [(0.25, 180, 320), (0.0, 0, 0), (7, 7, 7), (0, 0, 0), (999, 999, 999)],
)
def test_rows_are_held_out_by_share_or_number(
    folder: Folder, heldout: float, least: int, most: int
) -> None:
    folder.write(*rows(1000))
    task = folder.task(heldout=heldout)
    train, held = task.train_prompts(), task.heldout_prompts()
    assert least <= len(held) <= most
    assert len(train) + len(held) == 1000
    assert not {prompt.id for prompt in train} & {prompt.id for prompt in held}
    assert folder.task(heldout=heldout).heldout_prompts() == held
    if held and len(train) > 1:
        assert folder.task(seed=1, heldout=heldout).heldout_prompts() != held


def test_new_rows_do_not_move_old_ones_across_a_share(folder: Folder) -> None:
    folder.write(*rows(50))
    before = {prompt.id for prompt in folder.task(heldout=0.3).heldout_prompts()}
    folder.write(*rows(60))
    assert before <= {prompt.id for prompt in folder.task(heldout=0.3).heldout_prompts()}


def test_one_row_is_trained_on_and_of_two_one_is_held_out(folder: Folder) -> None:
    folder.write(*rows(1))
    assert (
        len(folder.task(heldout=0.1).train_prompts()),
        len(folder.task(heldout=0.1).heldout_prompts()),
    ) == (1, 0)
    folder.write(*rows(2))
    assert (
        len(folder.task(heldout=0.1).train_prompts()),
        len(folder.task(heldout=0.1).heldout_prompts()),
    ) == (1, 1)


def test_held_out_questions_are_not_trained_on(folder: Folder) -> None:
    folder.write(b'{"prompt": "a"}', b'{"prompt": "b  c"}', b'{"prompt": "d"}')
    folder.write(b'{"prompt": " b c"}', name="held.jsonl")
    task = folder.task(heldout="held.jsonl")
    assert [prompt.id for prompt in task.train_prompts()] == ["train-1", "train-3"]
    assert [prompt.id for prompt in task.heldout_prompts()] == ["heldout-1"]
    assert folder.said == ["1 of 3 training rows left out: the same question is held out"]
    with pytest.raises(DataError, match="every training row is also held out; hold out fewer"):
        folder.task(heldout="rows.jsonl")
    with pytest.raises(DataError, match="every training row is also held out"):
        folder.task(heldout=3)


@pytest.mark.parametrize("heldout", [-1, -0.1, 1.0, 1.5, True, None])
def test_a_share_that_makes_no_sense_is_refused(folder: Folder, heldout: object) -> None:
    with pytest.raises(ValidationError):
        folder.task(heldout=heldout)


def test_the_context_needs_no_place_for_rejected_rows(folder: Folder) -> None:
    folder.write(GOOD, b"x")
    config = Config(path=folder.path / "rows.jsonl", heldout=0, max_rejected=0.5)
    assert len(build(config, TaskContext(0, folder.path)).train_prompts()) == 1
