"""Read calls of tools from the text that a model wrote, in the form that its chat template asks for.

A form is strict: a text that begins a call must be calls to its end, or it is unreadable, which is
told to the model and counted. What a call says is data. Reasoning up to `</think>` holds no calls.
"""

import ast
import re
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from practicum.core.strict_json import JsonError, parse_json
from practicum.prompts import ToolCall, ToolSchema

LONGEST_CALL = 1 << 16
"""The most characters of a text that is read for calls."""

MOST_CALLS = 32
"""The most calls of one turn."""

LARGEST_NUMBER = sys.float_info.max
"""The largest absolute number of an argument."""


class UnreadableCall(ValueError):
    """A text that begins a call and is none; the message says why."""


Reader = Callable[[str, Mapping[str, ToolSchema]], list[ToolCall]]
"""Return the calls of a text, none if it begins none; UnreadableCall if one cannot be read."""


@dataclass(frozen=True, slots=True)
class CallForm:
    """A form of calls: the marks that identify a chat template of this form, and the reader."""

    marks: tuple[str, ...]
    read: Reader


def find_form(template: str) -> str | None:
    """Return the name of the first form with all marks in a chat template, or None."""
    return next(
        (name for name, form in FORMS.items() if all(mark in template for mark in form.marks)), None
    )


def read_calls(text: str, form: str, schemas: Sequence[ToolSchema]) -> list[ToolCall]:
    """Return the calls in a model's turn, in order; UnreadableCall if one cannot be read."""
    turn = text.rpartition("</think>")[2].strip()
    if len(turn) > LONGEST_CALL:
        raise UnreadableCall(f"the turn has more than {LONGEST_CALL} characters")
    return _check_calls(FORMS[form].read(turn, {schema.name: schema for schema in schemas}))


def _check_calls(calls: list[ToolCall]) -> list[ToolCall]:
    """Return the calls with arguments that JSON can hold; UnreadableCall for others or too many."""
    if len(calls) > MOST_CALLS:
        raise UnreadableCall(f"a turn may make {MOST_CALLS} calls, but has {len(calls)}")
    try:
        return [
            ToolCall(_check_value(call.name), _check_value(dict(call.arguments))) for call in calls
        ]
    except RecursionError:
        raise UnreadableCall("the arguments are nested too deeply") from None


def _check_value(argument: Any) -> Any:
    """Return a value that JSON can hold, with lists in place of tuples; else UnreadableCall."""
    match argument:
        case None | bool():
            return argument
        case str():
            if any("\ud800" <= letter <= "\udfff" for letter in argument):
                raise UnreadableCall("half of a surrogate pair is no character")
            return argument
        case int() | float():
            if not abs(argument) <= LARGEST_NUMBER:
                raise UnreadableCall("a number is too large")
            return argument
        case list() | tuple():
            return [_check_value(member) for member in argument]
        case dict():
            if not all(isinstance(key, str) for key in argument):
                raise UnreadableCall("the names in an object are texts")
            return {_check_value(key): _check_value(member) for key, member in argument.items()}
    raise UnreadableCall(f"JSON has no {type(argument).__name__}")


def _read_hermes(text: str, schemas: Mapping[str, ToolSchema]) -> list[ToolCall]:
    """Read `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, once or more."""
    calls: list[ToolCall] = []
    # Some models of this family write one list of calls between the tags.
    for body in _split_tagged(text):
        parsed = _parse_json(body)
        calls += [
            _build_call(part, "arguments")
            for part in (parsed if isinstance(parsed, list) else [parsed])
        ]
    return calls


def _read_glm(text: str, schemas: Mapping[str, ToolSchema]) -> list[ToolCall]:
    """Read `<tool_call>NAME<arg_key>KEY</arg_key><arg_value>TEXT</arg_value></tool_call>`."""
    calls = []
    for body in _split_tagged(text):
        name, tail = re.fullmatch(r"\s*([^<>\s]*)\s*(.*)", body, re.DOTALL).groups()  # type: ignore[union-attr]
        schema = schemas.get(name)
        if not name:
            raise UnreadableCall("write the name of a tool after <tool_call>")
        calls.append(ToolCall(name, _read_arguments(tail, _ARGUMENT, schema)))
    return calls


def _read_xml(text: str, schemas: Mapping[str, ToolSchema]) -> list[ToolCall]:
    """Read `<tool_call><function=NAME><parameter=KEY>TEXT</parameter></function></tool_call>`."""
    calls = []
    for body in _split_tagged(text):
        function = _FUNCTION.fullmatch(body.strip())
        if function is None:
            raise UnreadableCall("write <function=NAME>...</function> inside <tool_call>")
        arguments = _read_arguments(function["body"], _PARAMETER, schemas.get(function["name"]))
        calls.append(ToolCall(function["name"], arguments))
    return calls


def _read_arguments(text: str, form: re.Pattern[str], schema: ToolSchema | None) -> dict[str, Any]:
    """Return the arguments in a text of nothing else; UnreadableCall if it holds more."""
    arguments: dict[str, Any] = {}
    while match := form.match(text):
        if match["key"] in arguments:
            raise UnreadableCall(f"the parameter {match['key']!r} stands twice")
        arguments[match["key"]] = _read_value(match["value"], match["key"], schema)
        text = text[match.end() :]
    if text.strip():
        raise UnreadableCall("write only the parameters after the name of the tool")
    return arguments


def _read_mistral(text: str, schemas: Mapping[str, ToolSchema]) -> list[ToolCall]:
    """Read `[TOOL_CALLS] [{"name": ..., "arguments": {...}}]`, to the end of the text."""
    _, mark, body = text.partition("[TOOL_CALLS]")
    if not mark:
        return []
    parsed = _parse_json(body)
    if not isinstance(parsed, list) or not parsed:
        raise UnreadableCall("write a list of calls after [TOOL_CALLS]")
    return [_build_call(part, "arguments") for part in parsed]


def _read_json(text: str, schemas: Mapping[str, ToolSchema]) -> list[ToolCall]:
    """Read `{"name": ..., "parameters": {...}}` as the whole text."""
    marked = text.startswith("<|python_tag|>")
    body = text.removeprefix("<|python_tag|>").strip()
    # An answer may be an object too; one that begins with a name is a call.
    if not marked and re.match(r'\{\s*"name"\s*:', body) is None:
        return []
    return [_build_call(_parse_json(body), "parameters")]


def _read_lfm(text: str, schemas: Mapping[str, ToolSchema]) -> list[ToolCall]:
    """Read `<|tool_call_start|>[NAME(KEY=VALUE, ...), ...]<|tool_call_end|>`; words may stand around."""
    _, mark, body = text.partition("<|tool_call_start|>")
    if not mark:
        return []
    # The end is a special token, which is not part of a text at its end.
    calls = _read_pythonic(body.partition("<|tool_call_end|>")[0].strip(), schemas)
    if not calls:
        raise UnreadableCall("write [NAME(KEY=VALUE)] after <|tool_call_start|>")
    return calls


def _read_pythonic(text: str, schemas: Mapping[str, ToolSchema]) -> list[ToolCall]:
    """Read `[NAME(KEY=VALUE, ...), ...]` as the whole text; values are literals of Python."""
    if re.match(r"\[\s*[^\W\d][\w.]*\(", text) is None:
        return []
    try:
        with warnings.catch_warnings(action="ignore"):
            # The parser warns of odd escapes in a text, which are the model's.
            tree = ast.parse(text, mode="eval").body
        calls = tree.elts if isinstance(tree, ast.List) else [tree]
        return [_build_python_call(call) for call in calls]
    except UnreadableCall:
        raise
    # Deep nesting and odd characters end the parser in many ways.
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise UnreadableCall(f"not a list of calls ({type(error).__name__})") from None


def _build_python_call(call: ast.expr) -> ToolCall:
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
        raise UnreadableCall("write NAME(KEY=VALUE) for each call")
    arguments = {
        keyword.arg: ast.literal_eval(keyword.value)
        for keyword in call.keywords
        if keyword.arg is not None
    }
    if len(arguments) < len(call.keywords):
        raise UnreadableCall("write each argument once, as KEY=VALUE")
    return ToolCall(call.func.id, arguments)


_FUNCTION = re.compile(r"<function=(?P<name>[^<>\s]+)>(?P<body>.*)</function>", re.DOTALL)
_PARAMETER = re.compile(
    r"\s*<parameter=(?P<key>[^<>\s]+)>\n?(?P<value>.*?)\n?</parameter>", re.DOTALL
)
_ARGUMENT = re.compile(
    r"\s*<arg_key>(?P<key>[^<>]+)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>", re.DOTALL
)

FORMS: Mapping[str, CallForm] = {
    # The order matters: the marks of `xml` and `glm` include the mark of `hermes`.
    "xml": CallForm(("<tool_call>", "<function="), _read_xml),
    "glm": CallForm(("<tool_call>", "<arg_key>"), _read_glm),
    "hermes": CallForm(("<tool_call>",), _read_hermes),
    "mistral": CallForm(("[TOOL_CALLS]",), _read_mistral),
    "lfm": CallForm(("<|tool_call_start|>",), _read_lfm),
    "pythonic": CallForm(("func_name1(",), _read_pythonic),
    "json": CallForm(('"parameters"',), _read_json),
}
"""Every form by name; a template has the first form with all marks in it."""


def _split_tagged(text: str) -> list[str]:
    """Return the text of each `<tool_call>` element; other text may precede the first element."""
    _, *parts = text.split("<tool_call>")
    bodies = []
    for part in parts:
        body, end, tail = part.partition("</tool_call>")
        if not end:
            raise UnreadableCall("a <tool_call> has no </tool_call>")
        if tail.strip():
            raise UnreadableCall("text stands after </tool_call>; end the turn there")
        bodies.append(body)
    if not parts and "</tool_call>" in text:
        raise UnreadableCall("a </tool_call> has no <tool_call>")
    return bodies


def _parse_json(text: str) -> Any:
    try:
        return parse_json(text)
    except JsonError as error:
        raise UnreadableCall(f"not JSON ({error})") from None


def _build_call(parsed: Any, key: str) -> ToolCall:
    """Return the call that a JSON object describes, with its arguments at `key`."""
    if not isinstance(parsed, dict) or not isinstance(parsed.get("name"), str):
        raise UnreadableCall(f'write an object with "name" and "{key}"')
    if unknown := sorted(set(parsed) - {"name", key, "id", "type"}):
        raise UnreadableCall(f'write the arguments under "{key}", and no {unknown[0][:40]!r}')
    arguments = parsed.get(key, {})
    if not isinstance(arguments, dict):
        raise UnreadableCall(f'"{key}" is not an object')
    return ToolCall(parsed["name"], arguments)


def _read_value(text: str, key: str, schema: ToolSchema | None) -> Any:
    """Return the value of a parameter: JSON if its schema wants no text, else the text itself."""
    properties = {} if schema is None else schema.parameters.get("properties", {})
    declared = properties.get(key, {})
    if not isinstance(declared, Mapping) or declared.get("type", "string") == "string":
        return text
    return _parse_json(text)


def read_message(message: Mapping[str, Any]) -> list[ToolCall]:
    """Return the calls of a message as transformers parses it: `tool_calls` of `function`."""
    calls = message.get("tool_calls", [])
    if not isinstance(calls, list):
        raise UnreadableCall("the calls are not a list")
    return _check_calls(
        [
            _build_call(call.get("function") if isinstance(call, dict) else None, "arguments")
            for call in calls
        ]
    )
