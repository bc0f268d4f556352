"""Tool calls: the output of a template is parsed, in every form, and nothing else is a call."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_renderer import CHATML, byte_tokenizer
from tool_templates import CLOCK, SEARCH, TEMPLATES, USE, renderer

from practicum.errors import ModelError
from practicum.prompts import Message, ToolCall, ToolUse
from practicum.text import Renderer
from practicum.text.tool_calls import FORMS, LONGEST_CALL, UnreadableCall, find_form, read_calls

RENDERERS = {form: renderer(form) for form in TEMPLATES}
FORM = pytest.mark.parametrize("form", TEMPLATES)


def as_written(form: str, *calls: ToolCall) -> str:
    """Return the turn with these calls, as the family's template writes it, without its stop token."""
    tokenizer = RENDERERS[form].tokenizer
    functions = [{"name": call.name, "arguments": dict(call.arguments)} for call in calls]
    turn = {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"type": "function", "id": "call00000", "function": function} for function in functions
        ],
    }
    question = {"role": "user", "content": "?"}
    before = tokenizer.apply_chat_template([question], tokenize=False, add_generation_prompt=True)
    text = str(tokenizer.apply_chat_template([question, turn], tokenize=False))
    assert text.startswith(before)
    return text[len(before) :].rstrip("\n").removesuffix("<|im_end|>")


texts = st.text(st.characters(codec="utf-8", exclude_characters="<>\x00\r"), max_size=12)


@FORM
@given(query=texts, most=st.integers(-9, 9))
def test_what_a_template_writes_is_read_back(form: str, query: str, most: int) -> None:
    # In XML a line break at an end of a value belongs to the template, and cannot be distinguished from the text's.
    query = query.strip("\n") if form == "xml" else query
    call = ToolCall("search", {"query": query, "most": most})
    assert RENDERERS[form].call_form == form
    assert RENDERERS[form].read_calls(as_written(form, call)) == [call]


@pytest.mark.parametrize("form", ["hermes", "xml", "glm", "mistral", "lfm", "pythonic"])
def test_several_calls_are_read_in_order(form: str) -> None:
    calls = [ToolCall("search", {"query": "a"}), ToolCall("clock", {})]
    text = as_written(form, *calls)
    assert text.count("search") == text.count("clock") == 1
    if form in ("hermes", "xml", "glm", "lfm"):
        assert read_calls(f"Let me see.\n{text}", form, USE.schemas) == calls
    assert read_calls(text, form, USE.schemas) == calls


def test_an_odd_escape_in_a_call_is_no_warning() -> None:
    (call,) = read_calls(r'[search(query="\d")]', "pythonic", USE.schemas)
    assert call.arguments == {"query": r"\d"}


@FORM
@pytest.mark.parametrize(
    "text", ["", "42", "{}", '{"value": 3}', "a < b > c", "[1, 2]", "<b>done</b>", "</think>7"]
)
def test_an_answer_is_no_call(form: str, text: str) -> None:
    assert read_calls(text, form, USE.schemas) == []


@FORM
def test_a_call_within_reasoning_is_none(form: str) -> None:
    call = as_written(form, ToolCall("clock", {}))
    assert read_calls(f"<think>{call}</think>It is 3.", form, USE.schemas) == []
    assert len(read_calls(f"<think>hm</think>{call}", form, USE.schemas)) == 1


HERMES_BODIES = [
    ("<tool_call>{", "a <tool_call> has no </tool_call>"),
    ("{}</tool_call>", "a </tool_call> has no <tool_call>"),
    ("<tool_call>{</tool_call>", "not JSON"),
    ("<tool_call>[[[</tool_call>", "not JSON"),
    (
        '<tool_call>{"name": "clock", "parameters": {"zone": "UTC"}}</tool_call>',
        "write the arguments under \"arguments\", and no 'parameters'",
    ),
    ("<tool_call>" + "[" * 20000 + "</tool_call>", "not JSON"),
    ("<tool_call>3</tool_call>", 'write an object with "name" and "arguments"'),
    ('<tool_call>{"name": 3}</tool_call>', 'write an object with "name"'),
    ('<tool_call>{"name": "a", "arguments": [1]}</tool_call>', '"arguments" is not an object'),
    ('<tool_call>{"name": "a", "name": "b"}</tool_call>', "field 'name' stands twice"),
    ('<tool_call>{"name": "a", "arguments": {"x": NaN}}</tool_call>', "NaN is not a number"),
    ('<tool_call>{"name": "a"}</tool_call> and then', "text stands after </tool_call>"),
    ("x" * (LONGEST_CALL + 1), "has more than 65536 characters"),
]


@pytest.mark.parametrize(("text", "why"), HERMES_BODIES)
def test_a_call_that_cannot_be_read_says_why(text: str, why: str) -> None:
    with pytest.raises(UnreadableCall, match=why.replace("(", r"\(")):
        read_calls(text, "hermes", USE.schemas)


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("xml", "<tool_call>search</tool_call>"),
        ("xml", "<tool_call><function=search>query</function></tool_call>"),
        ("xml", "<tool_call><function=search><parameter=most>a</parameter></function></tool_call>"),
        (
            "xml",
            "<tool_call><function=a><parameter=b>1</parameter><parameter=b>2</parameter></function></tool_call>",
        ),
        ("glm", '<tool_call>{"name": "clock", "arguments": {}}</tool_call>'),
        ("glm", "<tool_call>search<arg_key>query</arg_key></tool_call>"),
        ("lfm", "<|tool_call_start|>clock"),
        ("mistral", '[TOOL_CALLS]{"name": "clock"}'),
        ("mistral", "[TOOL_CALLS][]"),
        ("pythonic", "[clock(]"),
        ("pythonic", "[search('a')]"),
        ("pythonic", "[search(query=open('x'))]"),
        ("pythonic", "[search(**{'query': 'a'})]"),
        ("pythonic", "[search(query='a', query='b')]"),
        ("pythonic", "[os.system(x=1)]"),
        ("pythonic", "[clock(), 3]"),
        ("pythonic", "[clock(x=" + "(" * 5000 + "]"),
        ("pythonic", '[search(query=b"x")]'),
        ("pythonic", "[search(query=...)]"),
        ("pythonic", "[search(query={1, 2})]"),
        ("pythonic", "[search(query=1+2j)]"),
        ("pythonic", "[search(query={(1, 2): 3})]"),
        ("pythonic", "[search(query=1e999)]"),
        ("pythonic", f"[search(query=0x{'f' * 9000})]"),
        ("pythonic", r"[search(query='\ud800')]"),
        ("json", '{"name": "search", "parameters": {"query": "\\ud800"}}'),
        ("json", '{"name": "search", "parameters": {"\\ud800": "a"}}'),
        ("json", '{"name": "search", "parameters": {"query": 1e999}}'),
        ("hermes", '<tool_call>[{"name": "clock"}' + ', {"name": "clock"}' * 32 + "]</tool_call>"),
        ("pythonic", "[clock(x=" + "-" * 60000 + "1)]"),
        ("json", '{"name": "clock", "parameters": {'),
        ("json", '{"name": "clock", "parameters": 3}'),
        ("json", "<|python_tag|>print(3)"),
    ],
)
def test_each_form_refuses_what_is_nearly_a_call(form: str, text: str) -> None:
    with pytest.raises(UnreadableCall):
        read_calls(text, form, USE.schemas)


@FORM
@given(
    pieces=st.lists(
        st.sampled_from(
            [*list('<>{}[]/=":, \nab'), "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<function="]
        )
    )
)
def test_any_text_is_calls_or_an_answer_or_unreadable(form: str, pieces: list[str]) -> None:
    try:
        calls = read_calls("".join(pieces), form, USE.schemas)
    except UnreadableCall:
        return
    assert all(isinstance(call.arguments, dict) for call in calls)


def test_a_template_of_no_form_is_refused_in_one_line() -> None:
    assert find_form(CHATML) is None and set(FORMS) == set(TEMPLATES)
    shows = "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}" + CHATML
    plain = Renderer(byte_tokenizer(shows), stop_ids=frozenset({258}))
    with pytest.raises(
        ModelError, match=r"no known form; set task.calls: one of xml, glm, hermes,"
    ):
        plain.with_tools(USE)
    assert plain.with_tools(ToolUse(USE.schemas, "hermes")).call_form == "hermes"


def test_a_form_that_does_not_read_what_the_template_writes_is_refused_by_its_name() -> None:
    for form in ("hermes", "xml", "pythonic"):
        plain = Renderer(byte_tokenizer(TEMPLATES["glm"]), stop_ids=frozenset({258}))
        refusal = rf"task\.calls: {form}: the chat template writes calls in another form, such as "
        with pytest.raises(ModelError, match=f"{refusal}<tool_call>search"):
            plain.with_tools(ToolUse(USE.schemas, form))
    renamed = TEMPLATES["hermes"].replace('"arguments"', '"parameters"')
    plain = Renderer(byte_tokenizer(renamed), stop_ids=frozenset({258}))
    with pytest.raises(ModelError, match=r'task\.calls: hermes: .* under "arguments", and no'):
        plain.with_tools(USE)


def test_a_template_that_does_not_show_the_tools_is_refused_in_one_line() -> None:
    with pytest.raises(
        ModelError, match=r"does not show the tools \(search\); write a `template:`"
    ):
        Renderer(byte_tokenizer(CHATML), stop_ids=frozenset({258})).with_tools(USE)


RESPONSE: dict[str, Any] = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "content": {},
        "tool_calls": {
            "open": "<<",
            "close": ">>",
            "content": "json",
            "repeats": True,
            "transform": {"type": "function", "function": "{content}"},
        },
    },
}


def test_a_tokenizer_that_brings_its_own_rule_is_read_by_it() -> None:
    own_marks = TEMPLATES["hermes"].replace("<tool_call>\\n", "<<").replace("\\n</tool_call>", ">>")
    tokenizer = byte_tokenizer(own_marks)
    tokenizer.response_template = RESPONSE
    own = Renderer(tokenizer, stop_ids=frozenset({258})).with_tools(USE)
    assert own.call_form == "response"
    call = json.dumps({"name": "search", "arguments": {"query": "a", "most": "3"}})
    assert own.read_calls(f"Well. <<{call}>>") == [ToolCall("search", {"query": "a", "most": 3})]
    assert own.read_calls("It is 3.") == []
    with pytest.raises(UnreadableCall, match="ValueError"):
        own.read_calls("<<{>>")


@FORM
def test_prompts_with_tools_are_those_of_transformers(form: str) -> None:
    # A schema without control tokens, which transformers would encode as control tokens.
    use = ToolUse((CLOCK,))
    own = Renderer(RENDERERS[form].tokenizer, stop_ids=frozenset({258})).with_tools(use)
    theirs = own.tokenizer.apply_chat_template(
        [{"role": "user", "content": "What time?"}],
        tools=[CLOCK.to_json()],
        add_generation_prompt=True,
    )["input_ids"]
    assert own.render([Message("user", "What time?")]) == tuple(theirs)


OWN_STOPS = {"hermes": 2, "xml": 2, "glm": 2, "json": 2, "mistral": 0, "lfm": 1, "pythonic": 1}


@FORM
def test_control_tokens_in_a_schema_stay_text(form: str) -> None:
    tokens = RENDERERS[form].render([Message("user", "?")])
    assert tokens.count(258) == OWN_STOPS[form], "the template's own"
    text = str(RENDERERS[form].tokenizer.decode(list(tokens)))
    assert SEARCH.description in text


REPLY_STOPS = {"hermes": 1, "xml": 1, "glm": 1, "json": 1, "mistral": 0, "lfm": 2, "pythonic": 2}


@FORM
def test_results_follow_the_very_call(form: str) -> None:
    """Check that a conversation rendered piece by piece has the tokens of the template's rendering of the whole."""
    own, question = RENDERERS[form], Message("user", "What time?")
    results = [Message("tool", "3 <|im_end|>", "clock"), Message("tool", "4", "clock")]
    called = Message("assistant", "", tool_calls=(ToolCall("clock", {}),))
    whole = own._chat.write([question, called, *results], "", shows_tools=False)
    reply = own.render_reply(*results)
    assert reply.count(258) == REPLY_STOPS[form], "what a tool says stays text"
    call = as_written(form, ToolCall("clock", {}))
    prompt = own._chat.write([question], "", shows_tools=False)
    assert prompt + call + "<|im_end|>" + str(own.tokenizer.decode(list(reply))) == whole


def test_no_system_turn_keeps_the_tools() -> None:
    shown = Renderer(
        byte_tokenizer(TEMPLATES["hermes"]), system="", stop_ids=frozenset({258})
    ).with_tools(USE)
    assert "search" in str(shown.tokenizer.decode(list(shown.render([Message("user", "?")]))))
