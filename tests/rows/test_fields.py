"""Rows in the layouts of other tools: read with every turn, or refused with the reason; nothing is dropped silently."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from row_folder import Folder, read_one, write_lines

from practicum.errors import DataError
from practicum.prompts import Message, ToolCall

ASK = {"role": "user", "content": "What is 2 plus 3?"}
QUESTION = Message("user", "What is 2 plus 3?")
ADD = {"name": "add", "arguments": {"a": 2, "b": 3}}
CALL = ToolCall("add", {"a": 2, "b": 3})


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def answer(**keys: Any) -> dict[str, Any]:
    return {"messages": [ASK, {"role": "assistant", "content": "5", **keys}]}


def call(identity: str | None = None, arguments: Any = None) -> dict[str, Any]:
    """Return a call in OpenAI's format, with its arguments as a text."""
    function = {"name": "add", "arguments": json.dumps(arguments or {"a": 2, "b": 3})}
    return {"type": "function", **({"id": identity} if identity else {}), "function": function}


def part(text: str, kind: str = "text", key: str = "text") -> dict[str, Any]:
    return {"type": kind, key: text}


# Each row of these has the question above and the answer 5.
READ: dict[str, dict[str, Any]] = {
    "parts, OpenAI": {
        "messages": [
            {"role": "user", "content": [part("What is 2 "), part("plus 3?")]},
            {"role": "assistant", "content": [part("5")]},
        ]
    },
    "parts, LLaMA-Factory v1": {
        "messages": [
            {
                "role": "user",
                "content": [part("What is 2 plus 3?", key="value")],
                "loss_weight": 0.0,
            },
            {"role": "assistant", "content": [part("5", key="value")], "loss_weight": 1.0},
        ]
    },
    "parts of a table, with empty keys": {
        "messages": [
            {"role": "user", "content": [{**part("What is 2 plus 3?"), "image_url": None}]},
            {"role": "assistant", "content": "5", "tool_calls": None, "name": None},
        ]
    },
    "turns as JSON text": {"messages": json.dumps(answer()["messages"])},
    "prompt as JSON text": {"prompt": json.dumps([ASK]), "response": "5"},
    "pairs, ms-swift": {"conversation": [{"human": "What is 2 plus 3?", "assistant": "5"}]},
    "ms-swift": {"query": "What is 2 plus 3?", "response": "5", "history": []},
}


@pytest.mark.parametrize("layout", READ)
def test_questions_and_answers_are_read(folder: Folder, layout: str) -> None:
    prompt = read_one(folder, READ[layout])
    assert (prompt.messages, prompt.response, prompt.reasoning) == ((QUESTION,), "5", None)
    assert not any("not used" in note for note in folder.said)


def test_a_turn_of_the_developer_is_the_system_turn(folder: Folder) -> None:
    row = {"messages": [{"role": "developer", "content": "s"}, ASK]}
    assert read_one(folder, row).messages == (Message("system", "s"), QUESTION)


@pytest.mark.parametrize(
    ("row", "columns"),
    [
        ({"system_prompt": "s", "question": "What is 2 plus 3?"}, {"prompt": "question"}),
        ({"rules": "s", "prompt": "What is 2 plus 3?"}, {"system": "rules"}),
        ({"system": "s", "messages": [ASK]}, {}),
        ({"system": "s", "query": "What is 2 plus 3?", "response": "5"}, {}),
    ],
)
def test_a_column_with_the_system_turn_is_read(
    folder: Folder, row: Mapping[str, Any], columns: dict[str, str]
) -> None:
    assert read_one(folder, row, columns=columns).messages == (Message("system", "s"), QUESTION)
    assert not any("not used" in note for note in folder.said)


def test_two_system_turns_are_refused_and_an_empty_one_is_none(folder: Folder) -> None:
    assert read_one(folder, {"system": "", "prompt": "p"}).messages == (Message("user", "p"),)
    row = {"system": "s", "messages": [{"role": "system", "content": "t"}, ASK]}
    with pytest.raises(DataError, match="system is given, and the turns begin with a system turn"):
        read_one(folder, row)


def test_history_stands_before_the_query(folder: Folder) -> None:
    row = {"query": "q", "response": "r", "history": [["h", "g"]]}
    turns = [(turn.role, turn.content) for turn in read_one(folder, row).messages]
    assert turns == [("user", "h"), ("assistant", "g"), ("user", "q")]


# Tool turns.

TALKS: dict[str, dict[str, Any]] = {
    "OpenAI": {
        "messages": [
            ASK,
            {"role": "assistant", "content": None, "tool_calls": [call("x")]},
            {"role": "tool", "content": "5", "tool_call_id": "x"},
            {"role": "assistant", "content": "It is 5."},
        ]
    },
    "OpenAI, older": {
        "messages": [
            ASK,
            {"role": "assistant", "content": None, "function_call": call()["function"]},
            {"role": "function", "name": "add", "content": "5"},
            {"role": "assistant", "content": "It is 5."},
        ]
    },
    "ShareGPT": {
        "conversations": [
            {"from": "human", "value": ASK["content"]},
            {"from": "function_call", "value": json.dumps(ADD)},
            {"from": "observation", "value": "5"},
            {"from": "gpt", "value": "It is 5."},
        ]
    },
    "ms-swift": {
        "messages": [
            ASK,
            {"role": "tool_call", "content": json.dumps(ADD)},
            {"role": "tool_response", "content": "5"},
            {"role": "assistant", "content": "It is 5."},
        ]
    },
    "LLaMA-Factory v1": {
        "messages": [
            {"role": "user", "content": [part(ASK["content"], key="value")]},
            {"role": "assistant", "content": [part(json.dumps(ADD), "tool_call", "value")]},
            {"role": "tool", "content": [part("5", key="value")]},
            {"role": "assistant", "content": [part("It is 5.", key="value")]},
        ]
    },
}


@pytest.mark.parametrize("layout", TALKS)
def test_calls_and_results_are_read(folder: Folder, layout: str) -> None:
    prompt = read_one(folder, TALKS[layout])
    called, result = prompt.messages[1:]
    assert (called.role, called.content, called.tool_calls) == ("assistant", "", (CALL,))
    assert (result.role, result.content, result.name) == ("tool", "5", "add")
    assert prompt.response == "It is 5."
    assert not any("not used" in note for note in folder.said)


def test_a_row_may_end_with_a_result(folder: Folder) -> None:
    row = {"messages": TALKS["OpenAI"]["messages"][:-1]}
    prompt = read_one(folder, row)
    assert prompt.messages[-1] == Message("tool", "5", "add") and prompt.response is None


def test_a_text_and_several_calls_are_one_turn(folder: Folder) -> None:
    turns = [
        {"from": "human", "value": "q"},
        {"from": "gpt", "value": "Let me add."},
        {"from": "function_call", "value": json.dumps([ADD, {"name": "zero", "arguments": "{}"}])},
        {"from": "function_call", "value": json.dumps(ADD)},
        {"from": "observation", "value": "5"},
        {"from": "observation", "value": "0"},
        {"from": "observation", "value": "5"},
        {"from": "gpt", "value": "done"},
    ]
    _, called, *results = read_one(folder, {"conversations": turns}).messages
    assert called.content == "Let me add."
    assert called.tool_calls == (CALL, ToolCall("zero", {}), CALL)
    assert [result.name for result in results] == ["add", "zero", "add"]


def test_results_stand_in_the_order_of_their_calls(folder: Folder) -> None:
    turns = [
        ASK,
        {"role": "assistant", "tool_calls": [call("x", {"a": 1}), call("y", {"a": 2})]},
        {"role": "tool", "content": "second", "tool_call_id": "y"},
        {"role": "tool", "content": "first", "tool_call_id": "x"},
        {"role": "assistant", "content": "done"},
    ]
    messages = read_one(folder, {"messages": turns}).messages
    assert [message.content for message in messages[2:]] == ["first", "second"]


@pytest.mark.parametrize(
    ("turn", "reason"),
    [
        ({"from": "function_call", "value": "add(2, 3)"}, r"\[1\].value is not JSON"),
        ({"from": "function_call", "value": '{"arguments": {}}'}, "not an object with name and"),
        ({"from": "function_call", "value": '{"name": "f", "arguments": [1]}'}, "not an object"),
        ({"from": "human", "value": "x", "tool_calls": [ADD]}, "is not a turn of the assistant"),
    ],
)
def test_a_call_that_cannot_be_read_is_refused(
    folder: Folder, turn: dict[str, str], reason: str
) -> None:
    with pytest.raises(DataError, match=reason):
        read_one(folder, {"conversations": [{"from": "human", "value": "q"}, turn]})


# Reasoning.


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_the_thoughts_of_a_turn_are_kept_apart(folder: Folder, key: str) -> None:
    messages = [*answer(**{key: "2 and 3"})["messages"], ASK, answer(**{key: "as before"})]
    messages[-1] = answer(**{key: "as before"})["messages"][-1]
    prompt = read_one(folder, {"messages": messages})
    assert prompt.messages[1] == Message("assistant", "5", reasoning="2 and 3")
    assert (prompt.response, prompt.reasoning) == ("5", "as before")


def test_thoughts_may_be_a_part_or_a_column(folder: Folder) -> None:
    content = [part("hm", "reasoning", "value"), part("5", key="value")]
    prompt = read_one(folder, answer(content=content))
    assert (prompt.response, prompt.reasoning) == ("5", "hm")
    row = {"prompt": "p", "response": "5", "reasoning_content": "hm"}
    assert read_one(folder, row).reasoning == "hm"
    row = {"prompt": "p", "completion": "5", "thoughts": "hm"}
    columns = {"response": "completion", "reasoning_content": "thoughts"}
    assert read_one(folder, row, columns=columns).reasoning == "hm"


# Choices.


@pytest.mark.parametrize(
    ("choices", "right"),
    [
        (["a", "b", "7"], 2),
        (["a", "b", "7"], "2"),
        (["a", "b", "7"], "C"),
        (["a", "b", "7"], "7"),
        (["a", "b", 7], 2.0),
        ({"text": ["a", "b", "7"], "label": ["A", "B", "C"]}, "C"),
        ({"A": "a", "B": "b", "C": "7"}, "C"),
        (["A) a", "B) b", "C) 7"], "C"),
    ],
)
def test_a_question_is_asked_with_its_choices(folder: Folder, choices: Any, right: Any) -> None:
    prompt = read_one(folder, {"question": "q", "choices": choices, "answer": right})
    assert prompt.question == "q\n\nA. a\nB. b\nC. 7" and prompt.answer == "C"
    assert folder.said[0].endswith("read as rows of MMLU")


def test_choices_may_have_another_column(folder: Folder) -> None:
    row = {"q": "q", "options": ["a", "b"], "correct": 1}
    columns = {"prompt": "q", "choices": "options", "answer": "correct"}
    assert read_one(folder, row, columns=columns).answer == "B"
    with pytest.raises(DataError, match="answer '2' is no index from 0, no letter and no text"):
        read_one(folder, {**row, "correct": 2}, columns=columns)
    with pytest.raises(DataError, match="choices is not a list of 2 to 26 texts"):
        read_one(folder, {**row, "options": ["a"]}, columns=columns)


@pytest.mark.parametrize(
    ("options", "keys"),
    [
        (["a", "b", "7"], {"answer": "C", "answer_index": 2, "cot_content": None}),
        (["a", "b", "7"], {"answer_index": 2}),
        (["a", "b", "7"], {"answer": "7"}),
        ({"A": "a", "B": "b", "C": "7"}, {"answer": "C"}),
    ],
)
def test_options_are_choices(folder: Folder, options: Any, keys: dict[str, Any]) -> None:
    prompt = read_one(folder, {"question": "q", "options": options, **keys}, strict=True)
    assert prompt.question == "q\n\nA. a\nB. b\nC. 7" and prompt.answer == "C"
    assert "read as rows of MMLU-Pro" in folder.said[0]


def test_a_letter_and_an_index_of_two_choices_are_refused(folder: Folder) -> None:
    row = {"question": "q", "options": ["a", "b"], "answer": "A", "answer_index": 1}
    with pytest.raises(
        DataError, match="answer is 'A' and answer_index 1, which is another choice"
    ):
        read_one(folder, row)


# Answers and files.


@pytest.mark.parametrize("given", [["2"], [2], {"target": ["2"]}, {"target": "2"}])
def test_the_one_answer_of_a_list_is_read(folder: Folder, given: Any) -> None:
    assert read_one(folder, {"prompt": "p", "answer": given}).answer == "2"


def test_rows_of_roll_have_their_turns_as_text(folder: Folder) -> None:
    turns = json.dumps([{"role": "system", "content": "s"}, ASK])
    row = {"prompt": ASK["content"], "messages": turns, "ground_truth": "5", "tag": "t"}
    prompt = read_one(folder, row)
    assert (prompt.messages, prompt.answer) == ((Message("system", "s"), QUESTION), "5")
    assert folder.said[0].endswith("read as rows of ROLL; not used: the columns prompt, tag")


@pytest.mark.parametrize(
    ("before", "after", "unused"),
    [
        ({}, {}, ""),
        (
            {"version": "1.1", "about": {"data": []}},
            {"test": [1]},
            "; not used: 'version', 'about', 'test'",
        ),
    ],
)
def test_a_list_within_an_object_is_read(
    folder: Folder, before: dict[str, Any], after: dict[str, Any], unused: str
) -> None:
    rows = [{"prompt": f"p{n}", "answer": n} for n in range(3)]
    text = json.dumps({**before, "data": rows, **after}, indent=1)
    (folder.path / "rows.json").write_text(f"{text}\n")
    prompts = folder.task(path="rows.json").train_prompts()
    assert [prompt.answer for prompt in prompts] == ["0", "1", "2"]
    assert folder.said[0].endswith(f"rows.json: its rows are the list under 'data'{unused}")


def test_a_row_with_a_list_is_no_wrapper(folder: Folder) -> None:
    write_lines(folder, [answer(), answer()], "rows.json")
    assert len(folder.task(path="rows.json").train_prompts()) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"data": [{"prompt": "a"}', "no comma or bracket follows row 1"),
        ('{"data": [{"prompt": "a"}] x', "more text follows the list"),
        ('{"data": [5]}', "row 1: not an object but of type int"),
        ('{"data": 5}', "give either prompt or messages"),
    ],
)
def test_a_broken_wrapper_is_refused(folder: Folder, text: str, message: str) -> None:
    (folder.path / "rows.json").write_text(text)
    with pytest.raises(DataError, match=message):
        folder.task(path="rows.json")


# Rows that are refused.

VIDEO = {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"prompt": "p", "videos": [{"bytes": "x"}]}, r"videos\[0\] is no list of frames"),
    ({"prompt": "p", "picture": "pictures/1.PNG"}, "write columns: {images: picture}"),
    (
        {"messages": [{"role": "user", "content": [part("What?"), VIDEO]}]},
        r"messages\[0\].content\[1\] is no list of frames, and a video's file is not read",
    ),
    (answer(tool_calls=[call()]), "the answer calls the tool 'add', and answers with calls are no"),
    (
        {"conversations": TALKS["ShareGPT"]["conversations"][:2]},
        "the answer calls the tool 'add'",
    ),
    (answer(weight=0), "has weight 0: it is not one to imitate; leave the row out"),
    (answer(loss=False), "has loss False: it is not one to imitate"),
    (answer(loss_weight=0.0), "has loss_weight 0.0: it is not one to imitate"),
    ({"prompt": "p", "completion": "c", "label": False}, "label is false, so its answer is not on"),
    ({**answer(), "label": False}, "label is false"),
    ({"instruction": "i", "output": "o", "kto_tag": "false"}, "kto_tag is false"),
    *(
        (
            {"prompt": "p", "completion": "c", "label": label},
            "label is 0, so its answer is not one to i",
        )
        for label in (0, 0.0, "0")
    ),
    ({"prompt": "p", "response": "r", "weight": 0}, "weight is 0, so its answer is not one to im"),
    ({**answer(), "loss": False}, "loss is False"),
]


@pytest.mark.parametrize(("row", "reason"), REFUSED)
def test_a_row_that_would_teach_something_else_is_refused(
    folder: Folder, row: dict[str, Any], reason: str
) -> None:
    with pytest.raises(DataError, match=f"all of its 1 rows are unusable; row 1 is .*{reason}"):
        read_one(folder, row)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "p", "images": []},
        {"prompt": "p", "image": None},
        {"prompt": "p", "completion": "c", "label": True},
        {"prompt": "p", "completion": "c", "label": 1},
        {"prompt": "p", "completion": "c", "kto_tag": "1"},
        answer(weight=1),
        {"messages": [*answer(weight=0)["messages"], ASK]},
    ],
)
def test_the_same_keys_without_harm_are_no_note(folder: Folder, row: dict[str, Any]) -> None:
    read_one(folder, row, strict=True)
    assert not any("not used" in note for note in folder.said)


def test_the_container_of_a_task_is_no_picture(folder: Folder) -> None:
    read_one(folder, {"prompt": "p", "image": "registry/name:sha-1"})
    assert folder.said[0].endswith("not used: the column image")


def test_tags_in_place_of_pictures_are_noted_once(folder: Folder) -> None:
    texts = ("2 < 3", "<image>What is it?", "See <img src='a.png'/> here.", "image <imgx>")
    write_lines(folder, [{"prompt": text} for text in texts])
    folder.task()
    (note,) = [note for note in folder.said if "<image>" in note]
    assert "2 of 4 rows hold a tag such as <image> or <img ...> and have no picture, the fi" in note


# Keys that are not used.

UNUSED: list[tuple[dict[str, Any], str]] = [
    (answer(refusal="no"), "messages[].refusal"),
    (answer(weight=0.5), "messages[].weight"),
    ({"messages": [{**ASK, "name": "Ann"}]}, "messages[].name"),
    ({"messages": [{**ASK, "content": [{**part("q"), "cache": 1}]}]}, "messages[].content[].cache"),
    ({"prompt": "p", "label": False}, "label"),
    ({"prompt": "p", "label": 0}, "label"),
    ({"prompt": "p", "response": "r", "label": 2}, "label"),
    ({"prompt": "p", "reasoning_content": "hm"}, "reasoning_content"),
    ({**TALKS["ShareGPT"], "tools": '[{"name": "add"}]'}, "tools"),
]


@pytest.mark.parametrize(("row", "key"), UNUSED)
def test_a_key_that_is_not_used_is_noted_once_or_refused(
    folder: Folder, row: dict[str, Any], key: str
) -> None:
    write_lines(folder, [row, row])
    folder.task()
    (note,) = [note for note in folder.said if "not used" in note]
    assert f"not used: the column {key}" in note
    with pytest.raises(DataError, match="unknown field"):
        folder.task(strict=True)


def test_a_column_that_another_one_hides_is_noted(folder: Folder) -> None:
    read_one(folder, {"prompt": "p", "question": "q"}, columns={"prompt": "question"})
    assert folder.said[0].endswith("not used: the column prompt")


def test_a_truth_value_is_not_proposed_as_an_answer(folder: Folder) -> None:
    read_one(folder, {"prompt": "p", "label": True})
    assert "columns:" not in folder.said[0]


# Advice.


@pytest.mark.parametrize(
    ("row", "advice"),
    [
        (
            {"frage": "q", "antwort": "a"},
            "it has the columns frage, antwort: write columns: {promp",
        ),
        (
            {"problem": "q", "solution": "s", "final_answer": "a"},
            "answer: final_answer} in the task",
        ),
    ],
)
def test_rows_without_a_question_are_refused_with_what_to_write(
    folder: Folder, row: dict[str, Any], advice: str
) -> None:
    with pytest.raises(DataError) as refusal:
        read_one(folder, row)
    assert advice in str(refusal.value)


def test_no_advice_stands_where_it_would_change_nothing(folder: Folder) -> None:
    with pytest.raises(DataError) as refusal:
        read_one(folder, {"conversations": [{"from": "bot", "value": "x"}]})
    assert "columns:" not in str(refusal.value)
