"""The turns of a conversation as OpenAI, ShareGPT, LLaMA-Factory and ms-swift write them.

Each turn becomes a `Message`. A key that is not read is noted, and what cannot be read is rejected.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from practicum.pictures import IMAGE, get_mark
from practicum.prompts import Message, ToolCall
from practicum.rows.pictures import PICTURE_PARTS, SOUND_PARTS, VIDEO_PARTS, name_frames, name_part
from practicum.rows.strict import Rejected, check_text, parse_text

Note = Callable[[str], None]
"""Gets the name of a column or key that is not used; it may raise Rejected."""

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "tool_response": "tool",
    "function_call": "assistant",
    "tool_call": "assistant",
}
"""The role of a turn by its name in a file."""
CALLING = ("function_call", "tool_call")
"""The roles of turns with a call, or a list of calls, as JSON text."""
REASONING = ("reasoning_content", "reasoning", "thinking")
"""The keys of a turn with the thoughts before its text."""
WEIGHTS = ("weight", "loss_weight", "loss")
"""The keys of a turn that say whether it is trained on."""
TEXT_PARTS = ("text", "input_text", "output_text")
REASONING_PARTS = ("reasoning", "thinking")
KEYS = ("role", "content")
NOT_READ = "only text, pictures, sounds and frames of videos are read; leave such rows out"


@dataclass(slots=True)
class _Fields:
    """The keys of one object with a value, and the keys that were read."""

    values: dict[str, Any]
    place: str
    read: set[str] = field(default_factory=set)

    def take(self, *names: str) -> Any:
        """Return the value of the first of these keys that the object has, or None."""
        present = [name for name in names if name in self.values]
        self.read.update(present[:1])
        return self.values[present[0]] if present else None

    def take_text(self, *names: str) -> str | None:
        """Return the text of the first of these keys; Rejected if it is no text."""
        value = self.take(*names)
        if value is not None and not isinstance(value, str):
            raise Rejected(f"{self.place}.{names[0]} is not a text")
        return None if value is None else check_text(value, f"{self.place}.{names[0]}")

    def list_left(self) -> list[str]:
        """Return the keys that were not read."""
        return [name for name in self.values if name not in self.read]


@dataclass(frozen=True, slots=True)
class _FileTurn:
    """One turn of a file: its message, the identities of its calls or of its result, its weights."""

    message: Message
    call_ids: tuple[str | None, ...] = ()
    result_id: str | None = None
    weights: Mapping[str, Any] = field(default_factory=dict)


def parse_turns(turns: Any, name: str, note: Note) -> tuple[Message, ...]:
    """Return the messages of a list of turns, or of a JSON text that holds one, in the field `name`.

    The last turn of the assistant is an answer to imitate. Raises Rejected if the list cannot be
    read or if its answer is marked as one that is not trained on.
    """
    if isinstance(turns, str):
        try:
            turns = parse_text(turns, name)
        except Rejected as rejection:
            raise Rejected(
                f"{rejection}: it is a text that holds no list of turns; write the rows as JSON Lines "
                "or Parquet"
            ) from None
    if not isinstance(turns, list) or not turns:
        raise Rejected(f"{name} is not a list of turns")
    parsed: list[_FileTurn] = []
    for number, row in enumerate(_split_pairs(turns)):
        turn, is_call = _parse_turn(row, f"{name}[{number}]", f"{name}[]", note)
        if is_call and parsed and parsed[-1].message.role == "assistant":
            # ShareGPT writes each call as a separate turn, also after a text.
            calls = (*parsed[-1].message.tool_calls, *turn.message.tool_calls)
            parsed[-1] = replace(
                parsed[-1],
                message=replace(parsed[-1].message, tool_calls=calls),
                call_ids=(*parsed[-1].call_ids, *turn.call_ids),
            )
        else:
            parsed.append(turn)
    for number, turn in enumerate(parsed):
        is_answer = number == len(parsed) - 1 and turn.message.role == "assistant"
        _check_weights(turn.weights, f"{name}[]", is_answer, note)
    return tuple(_match_results(parsed))


def check_order(messages: Sequence[Message]) -> None:
    """Raise Rejected unless user and assistant alternate, with results of tools before an answer."""
    turns = [message for message in messages if message.role != "system"]
    if any(message.role == "system" for message in messages[1:]):
        raise Rejected("a system turn stands after another turn; put it first")
    follows = {"": ("user",), "user": ("assistant",), "assistant": ("user", "tool")}
    before = ""
    for turn in turns:
        if turn.role not in follows.get(before, ("assistant", "tool")):
            break
        before = turn.role
    else:
        if turns and (turns[-1].content.strip() or turns[-1].role == "tool"):
            return
        if turns and not turns[-1].tool_calls:
            raise Rejected("the last turn is empty")
        if turns:
            return
    raise Rejected("user and assistant turns do not alternate, beginning with user")


def _split_pairs(turns: Sequence[Any]) -> list[Any]:
    """Return the turns; an object with the keys `human` and `assistant` (ms-swift) is two of them."""
    rows: list[Any] = []
    for turn in turns:
        if isinstance(turn, dict) and turn.keys() == {"human", "assistant"}:
            rows += [{"from": role, "value": text} for role, text in turn.items()]
        else:
            rows.append(turn)
    return rows


def _parse_turn(row: Any, place: str, key_place: str, note: Note) -> tuple[_FileTurn, bool]:
    """Return a turn, and True if it is a turn of ShareGPT that only holds calls."""
    role_key, text_key = ("from", "value") if isinstance(row, dict) and "from" in row else KEYS
    # A turn that only calls tools has no text.
    calls_only = isinstance(row, dict) and (row.get("tool_calls") or row.get("function_call"))
    if not isinstance(row, dict) or role_key not in row or not (text_key in row or calls_only):
        raise Rejected(f"{place} is not an object with role and content")
    filled = {key: value for key, value in row.items() if value not in (None, [], {})}
    fields = _Fields(filled, place)
    role = fields.take(role_key)
    if not isinstance(role, str) or role not in ROLES:
        raise Rejected(f"{place}.{role_key} is {str(role)[:40]!r}; known: {', '.join(ROLES)}")
    content = _parse_content(fields, text_key, key_place, note)
    if content.text is None and not (calls_only or content.calls):
        raise Rejected(f"{place}.{text_key} is not a text")
    message = Message(
        ROLES[role], content.text or "", reasoning=content.reasoning, images=tuple(content.images)
    )
    if message.images and message.role != "user":
        raise Rejected(
            f"{place} is not a turn of the user, and holds a picture or a sound; move it to one"
        )
    calls = [*content.calls, *_list_calls(fields)]
    if is_call := role in CALLING:
        calls += _unwrap(parse_text(message.content, f"{place}.{text_key}"))
        message = replace(message, content="")
    result_id = None
    if message.role == "assistant":
        thoughts = fields.take_text(*REASONING)
        read = tuple(_parse_call(call, place) for call in calls)
        message = replace(
            message,
            reasoning=thoughts if message.reasoning is None else message.reasoning,
            tool_calls=read,
        )
    elif calls:
        raise Rejected(f"{place} calls tools, and is not a turn of the assistant")
    if message.role == "tool":
        message = replace(message, name=fields.take_text("name"))
        result_id = fields.take_text("tool_call_id")
    weights = {key: fields.take(key) for key in WEIGHTS if key in fields.values}
    for key in fields.list_left():
        note(f"{key_place}.{key}")
    ids = tuple(call.get("id") if isinstance(call, dict) else None for call in calls)
    return _FileTurn(message, ids, result_id, weights), is_call


@dataclass(slots=True)
class _Content:
    """The content of a turn: its text with the places of its media, its reasoning and its calls.

    A medium without a file has no name: the row's column has it.
    """

    text: str | None = None
    reasoning: str | None = None
    calls: list[Any] = field(default_factory=list)
    images: list[str] = field(default_factory=list)


def _parse_content(fields: _Fields, text_key: str, key_place: str, note: Note) -> _Content:
    """Return the content of a turn, which is a text or a list of parts."""
    place = f"{fields.place}.{text_key}"
    parts = fields.take(text_key)
    if not isinstance(parts, list):
        if parts is not None and not isinstance(parts, str):
            raise Rejected(f"{place} is not a text")
        return _Content(None if parts is None else check_text(parts, place))
    texts: list[str] = []
    content = _Content()
    for number, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in (*PICTURE_PARTS, *SOUND_PARTS):
            content.images.append(name_part(part, f"{place}[{number}]"))
            texts.append(get_mark(content.images[-1]))
            continue
        if kind in VIDEO_PARTS:
            content.images += (frames := name_frames(part, f"{place}[{number}]"))
            texts.append(IMAGE * len(frames))
            continue
        if kind not in (*TEXT_PARTS, *REASONING_PARTS, "tool_call"):
            raise Rejected(f"{place}[{number}] is of the type {str(kind)[:40]}; {NOT_READ}")
        filled = {key: inner for key, inner in part.items() if inner is not None}
        keys = _Fields(filled, f"{place}[{number}]", {"type"})
        text = keys.take_text("text", "value", "thinking")
        if text is None:
            raise Rejected(f"{place}[{number}].text is not a text")
        if kind in TEXT_PARTS:
            texts.append(text)
        elif kind in REASONING_PARTS:
            content.reasoning = (content.reasoning or "") + text
        else:
            content.calls += _unwrap(parse_text(text, f"{place}[{number}]"))
        for key in keys.list_left():
            note(f"{key_place}.{text_key}[].{key}")
    content.text = "".join(texts)
    return content


def _unwrap(calls: Any) -> list[Any]:
    return calls if isinstance(calls, list) else [calls]


def _list_calls(fields: _Fields) -> list[Any]:
    """Return the calls under `tool_calls`, or the single call under `function_call` (older OpenAI)."""
    calls = fields.take("tool_calls", "function_call")
    return [] if calls is None else _unwrap(calls)


def _parse_call(call: Any, place: str) -> ToolCall:
    """Return a call of `name` and `arguments`, also within `function`."""
    function = call.get("function", call) if isinstance(call, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str) or not name:
        raise Rejected(f"{place}: a call of a tool is not an object with name and arguments")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        arguments = parse_text(arguments, f"{place}: the arguments of {name[:40]}")
    if not isinstance(arguments, dict):
        raise Rejected(f"{place}: the arguments of {name[:40]} are not an object")
    return ToolCall(check_text(name, f"{place}: a tool's name"), arguments)


def _match_results(turns: Sequence[_FileTurn]) -> list[Message]:
    """Return the messages, with the results of a turn's calls in the order and with the names of these."""
    messages: list[Message] = []
    calls: list[tuple[str | None, str]] = []
    for is_result, run in groupby(turns, lambda turn: turn.message.role == "tool"):
        group = list(run)
        if not is_result:
            last = group[-1]
            names = [call.name for call in last.message.tool_calls]
            calls = list(zip(last.call_ids, names, strict=True))
            messages += [turn.message for turn in group]
            continue
        places = {identity: place for place, (identity, _) in enumerate(calls) if identity}
        group.sort(key=lambda turn: places.get(turn.result_id or "", len(places)))
        for place, turn in enumerate(group):
            name = calls[place][1] if place < len(calls) else None
            messages.append(replace(turn.message, name=turn.message.name or name))
    return messages


def _check_weights(weights: Mapping[str, Any], place: str, is_answer: bool, note: Note) -> None:
    """Reject an answer with a weight of 0, and note each weight that is not followed."""
    for key, weight in weights.items():
        if isinstance(weight, bool | int | float) and is_answer and not weight:
            raise Rejected(
                f"the answer, which is the last turn, has {key} {weight}: it is not one to imitate; "
                "leave the row out, or end it with the user's turn"
            )
        # Only the answer is trained on, with a weight of 1.
        if weight != int(is_answer):
            note(f"{place}.{key}")
