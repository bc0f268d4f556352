"""A chat template gives the text of transformers, and stays within its bounds for any content."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from practicum.errors import ModelError
from practicum.text import Renderer, build_character_tokenizer, templates
from practicum.types import Message

TURNS = [
    Message("system", "be\nbrief "),
    Message("user", "What is 7 % 8?\n"),
    Message("assistant", "it's <b>56</b>"),
]

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
QWEN = """{%- if tools %}{{- '# Tools' }}{%- else %}
    {%- if messages[0].role == 'system' %}{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{%- endif %}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string and not(message.content.startswith('<t>')) %}
        {%- set ns.multi_step_tool = false %}{%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}{%- set content = message.content %}{%- else %}{%- set content = '' %}{%- endif %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if '</think>' in content %}
            {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>' + message.role + '\\n' + content }}{{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""
LLAMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}{% set rest = messages[1:] %}"
    "{% else %}{% set system = false %}{% set rest = messages %}{% endif %}{% for m in rest %}{% if loop.index0 == 0 and system %}"
    "{% set content = '<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' + m['content'] %}{% else %}{% set content = m['content'] %}"
    "{% endif %}{% if m['role'] == 'user' %}{{ '[INST] ' + content.strip() + ' [/INST]' }}{% else %}"
    "{% generation %}{{ ' ' ~ content ~ ' ' ~ eos_token }}{% endgeneration %}{% endif %}{% endfor %}"
)
PARTS = """{%- macro shown(turn, wide=false) -%}[{{ turn.role|upper }}:
{{ caller() if caller else turn.content|trim }}]{%- endmacro %}
{% set all = messages|map(attribute='content')|map('replace', 'e', 'E')|join(' / ') %}{{ all|tojson }} {{ all|e }}
{% for turn in messages|selectattr('role', 'equalto', 'user') if turn.content %}{{ loop.index }}{{ shown(turn, wide=true) }}
{% else %}none{% endfor %}
{% call shown(messages[0]) %}{{ '%-8s|%5.2f' % ('x', 1.5) }}{{ '{:>4}-{a!r}'.format(7, a='b') }}{{ 'n %d'|format(3) }}{% endcall %}
{% set ns = namespace(items=[], n=0) %}{% for m in messages %}{% if loop.last %}{% break %}{% endif %}
{% set ns.items = ns.items + [m.role] %}{% set ns.n = ns.n + m.content|length %}{% endfor %}{{ ns.items }} {{ ns.n }}
{{ 2 ** 5 * 3 }}
{{ {'a': [1, (2, 3)], 'b': none}|tojson(indent=2) }} {{ dict(a=1)|items|list }} {{ range(3)|list|reverse|join('-') }}
{{ 'ab'.center(9, '*') }}{{ '-' * 5 }}{{ [0] * 2 }}{{ ['b', 'a']|sort|first }}{{ 'a,b'.split(',')|batch(1)|list }}
{% filter indent(2) %}one
two{% endfilter %}{% set block %}inner {{ 1 ~ 'x' ~ none }}{% endset %}{{ block }}{{ cycler('o', 'e').next() }}"""


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return build_character_tokenizer("abcdefghijklmnopqrstuvwxyz ")


def plain(
    tokenizer: PreTrainedTokenizerBase, template: str, turns: list[Message], **switches: Any
) -> str:
    """Return the text of transformers."""
    messages = [{"role": turn.role, "content": turn.content} for turn in turns]
    return str(
        tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False, **switches)
    )


def bounded(
    tokenizer: PreTrainedTokenizerBase, template: str, turns: list[Message], **switches: Any
) -> str:
    messages = [{"role": turn.role, "content": turn.content} for turn in turns]
    return templates.render_template(
        template, messages, {**tokenizer.special_tokens_map, **switches}
    )


@pytest.mark.parametrize(
    "template", [CHATML, QWEN, LLAMA, PARTS], ids=["chatml", "qwen", "llama", "parts"]
)
@given(
    contents=st.lists(st.text(max_size=40), min_size=1, max_size=5),
    thinking=st.sampled_from([True, False]),
)
def test_it_writes_what_transformers_writes(
    tokenizer: PreTrainedTokenizerBase, template: str, contents: list[str], thinking: bool
) -> None:
    roles = ["user", "assistant"] if len(contents) % 2 else ["system", "user", "assistant"]
    turns = [Message(roles[place % len(roles)], content) for place, content in enumerate(contents)]
    for switches in (
        {"add_generation_prompt": True, "enable_thinking": thinking},
        {"add_generation_prompt": False},
    ):
        assert bounded(tokenizer, template, turns, **switches) == plain(
            tokenizer, template, turns, **switches
        )


def test_a_long_conversation_is_no_trouble(tokenizer: PreTrainedTokenizerBase) -> None:
    turns = [Message(["user", "assistant"][place % 2], "word\n" * 500) for place in range(400)]
    for template in (CHATML, QWEN, PARTS):
        assert bounded(tokenizer, template, turns, add_generation_prompt=True) == plain(
            tokenizer, template, turns, add_generation_prompt=True
        )


R = "range(100000)"
X = "x" * 5000
GROWING = "{% set ns = namespace(x='ab') %}{% for i in range(60) %}"
HOSTILE = {
    "three loops": f"{{% for a in {R} %}}{{% for b in {R} %}}{{% for c in {R} %}}{{% endfor %}}{{% endfor %}}{{% endfor %}}",
    "loops that find nothing": f"{{% for a in {R} %}}{{% for b in {R} if false %}}x{{% endfor %}}{{% endfor %}}",
    "text in loops": f"{{% for a in {R} %}}{{% for b in {R} %}}{X}{{% endfor %}}{{% endfor %}}",
    "a macro's text": f"{{% macro m() %}}{{% for a in {R} %}}{X}{{% endfor %}}{{% endmacro %}}{{{{ m()|length }}}}",
    "constants in loops": f"{{% set x %}}{{% for a in {R} %}}{{{{ 'a'|center(9999) }}}}{{% endfor %}}{{% endset %}}{{{{ x }}}}",
    "a product": "{{ 'a' * 10**9 }}",
    "a product of lists": "{{ ([0] * 10**9)|length }}",
    "a product from the left": "{{ 10**9 * 'a' }}",
    "a power": "{{ 10 ** (10 ** 10) }}",
    "squares": "{% set ns = namespace(x=3) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}{{ ns.x > 2 }}",
    "doubling": GROWING + "{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "adding": GROWING + "{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "joining": GROWING + "{% set ns.x = [ns.x, ns.x]|join %}{% endfor %}",
    "replacing": GROWING + "{% set ns.x = ns.x.replace('a', ns.x) %}{% endfor %}",
    "the replace filter": GROWING + "{% set ns.x = ns.x|replace('a', ns.x) %}{% endfor %}",
    "a method that joins": GROWING + "{% set ns.x = ns.x.join(ns.x) %}{% endfor %}",
    "a method that joins what is reversed": GROWING
    + "{% set ns.x = ns.x.join(ns.x|list|reverse) %}{% endfor %}",
    "formatting": GROWING + "{% set ns.x = '%s%s' % (ns.x, ns.x) %}{% endfor %}",
    "formatting by a method": GROWING + "{% set ns.x = '{0}{0}'.format(ns.x) %}{% endfor %}",
    "capturing": GROWING
    + "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}{% endfor %}",
    "lists of lists": GROWING + "{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x == ns.x }}",
    "mappings of mappings": GROWING + "{% set ns.x = {1: ns.x, 2: ns.x} %}{% endfor %}",
    "mappings by a call": GROWING + "{% set ns.x = dict(a=ns.x, b=ns.x) %}{% endfor %}{{ ns.x }}",
    "tuples of tuples": GROWING + "{% set ns.x = (ns.x, ns.x) %}{% endfor %}",
    "names of names": "{% set a = namespace() %}{% set b = namespace(x=[a, a]) %}{% set l = [b, b] %}{% set a.x = [b] %}{{ l }}",
    "center": "{{ 'a'|center(10**9) }}",
    "center by a method": "{{ 'a'.center(10**9) }}",
    "zfill": "{{ 'a'.zfill(10**9) }}",
    "indent": "{{ 'a\\nb'|indent(10**9) }}",
    "indent by a text": "{{ ('\\n' * 10**6)|indent('x' * 10**6) }}",
    "a width": "{{ '%1000000000d' % 1 }}",
    "a width of bytes": "{{ 'x'.encode() }}",
    "a width as an argument": "{{ '%*d' % (10**9, 1) }}",
    "a format's width": "{{ '{:1000000000}'.format(1) }}",
    "a format's width as an argument": "{{ '{:{}}'.format(1, '1000000000') }}",
    "the format filter": "{{ '%1000000000d'|format(1) }}",
    "a mapped filter": f"{{{{ {R}|map('string')|map('center', 100000)|join }}}}",
    "one large text often": "{% set x = 'a' * 10**7 %}{{ ([x] * 10**4)|join }}",
    "separators": f"{{% set x = 'a' * 10**7 %}}{{{{ {R}|join(x) }}}}",
    "separators of mapped items": f"{{% set x = 'a' * 10**7 %}}{{{{ {R}|map('string')|join(x) }}}}",
    "json": "{{ ([0] * 10**5)|tojson(indent=10**5) }}",
    "json's separators": "{{ ([0] * 10**5)|tojson(separators=('x' * 10**6, 'y')) }}",
    "batches": "{{ [1]|batch(10**9, 'x')|list }}",
    "rounding": "{{ 1.5|round(10**8, 'floor') }}",
    "sums of lists": "{{ ([[1]] * 10**5)|sum(start=[]) }}",
    "lipsum": "{{ lipsum(n=10**6) }}",
    "bytes of a number": "{{ (1).to_bytes(10**9, 'big') }}",
    "translate": "{{ ('a' * 10**6).translate({97: 'b' * 10**6}) }}",
    "tabs": "{{ ('\\t' * 10**6).expandtabs(10**6) }}",
    "itself": "{% macro m() %}{{ m() }}{{ m() }}{% endmacro %}{{ m() }}",
    "a block in itself": "{% block b %}{{ self.b() }}{% endblock %}",
    "a recursive loop": "{% for i in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}",
    "a refund": f"{{{{ (-10**18)|_turn }}}}{{% for a in {R} %}}{{% for b in {R} %}}{{% endfor %}}{{% endfor %}}",
    "no such template": "{% include 'x' %}",
    "deep brackets": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "deep loops": "{% for a in [1] %}" * 60 + "{% endfor %}" * 60,
    "a long one": "x" * (templates.MAX_TEMPLATE_CHARACTERS + 1),
    "no number": "{{ 1 / 0 }}",
    "messages as a number": "{{ messages + 1 }}",
}


WAYS = {
    "itself": "RecursionError",
    "a block in itself": "RecursionError",
    "a recursive loop": "(RecursionError|longer than 1 s)",
    "no such template": "TypeError",
    "deep brackets": "RecursionError",
    "deep loops": "SyntaxError",
    "lipsum": "'lipsum' is undefined",
    "a refund": "No filter named '_turn'",
    "no number": "ZeroDivisionError",
    "messages as a number": "TypeError",
}
"""Templates that fail by themselves."""


@pytest.mark.long
@pytest.mark.parametrize("name", HOSTILE)
def test_a_template_that_would_not_end_is_refused_in_one_line(
    tokenizer: PreTrainedTokenizerBase, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(templates, "SECONDS", 1.0)
    way = WAYS.get(name, "does too much: .*; write another `template:` in the recipe$")
    with pytest.raises(ModelError, match=rf"^the tokenizer: the chat template .*{way}") as caught:
        Renderer(tokenizer, template=HOSTILE[name]).render(TURNS)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600


def test_a_bound_holds_in_every_thread_and_is_whole_again_afterwards(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(templates, "MAX_WORK", 5000)
    renderer = Renderer(
        tokenizer, template="{% for i in range(1500) %}{% endfor %}{{ messages[0].content }}"
    )
    results: list[Any] = []
    threads = [
        threading.Thread(target=lambda: results.append(renderer.render(TURNS[1:2])))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 3 and results == [renderer.render(TURNS[1:2])] * 3


EXPRESSIONS = st.recursive(
    st.sampled_from(
        [
            "messages",
            "'ab'",
            "7",
            "none",
            "x",
            "loop",
            "messages[0].content",
            "[1]",
            "{}",
            "range(9)",
            "namespace(a=1)",
        ]
    ),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["+", "*", "~", "%", "**", "in", "==", "<"]), inner).map(
            lambda t: f"({' '.join(t)})"
        ),
        st.tuples(inner, st.sampled_from(sorted(templates.FILTERS))).map(
            lambda t: f"({t[0]}|{t[1]})"
        ),
        st.tuples(inner, st.sampled_from(sorted(templates.FILTERS)), inner).map(
            lambda t: f"({t[0]}|{t[1]}({t[2]}))"
        ),
        st.tuples(inner, st.sampled_from(sorted(templates.METHODS)), inner).map(
            lambda t: f"{t[0]}.{t[1]}({t[2]})"
        ),
        st.tuples(inner, inner).map(lambda t: f"[{t[0]}, {t[1]}]"),
    ),
    max_leaves=6,
)


@given(
    st.one_of(st.text(max_size=60), st.text("{}%-|()'.ax messages for in endfor if", max_size=60))
)
def test_any_text_as_a_template_is_written_or_refused(text: str) -> None:
    renderer = Renderer(build_character_tokenizer("ab"), template=text)
    try:
        assert isinstance(renderer.render(TURNS[1:2]), tuple)
    except ModelError as refused:
        assert len(str(refused).splitlines()) == 1  # noqa: PT017 - most are no error


@given(st.lists(EXPRESSIONS, min_size=1, max_size=3))
def test_any_expression_is_what_it_is_in_transformers_or_refused(expressions: list[str]) -> None:
    tokenizer = build_character_tokenizer("ab")
    template = (
        "{% for x in messages %}"
        + "".join(f"{{{{ {text} }}}};" for text in expressions)
        + "{% endfor %}"
    )
    try:
        expected = plain(tokenizer, template, TURNS[1:2])
    except Exception as error:  # a template may fail in any way
        expected = type(error)
    if isinstance(expected, str) and " object at 0x" in expected:
        return
    try:
        found: Any = bounded(tokenizer, template, TURNS[1:2])
    except templates.TooMuch:
        return
    except Exception as error:  # the same failure
        found = type(error)
    assert found == expected, json.dumps(template)


def test_templates_of_a_folder_are_read(tmp_path: Path) -> None:
    """The folder's own template has the same bounds as the recipe's."""
    tokenizer = build_character_tokenizer("ab")
    tokenizer.chat_template = HOSTILE["a product"]
    tokenizer.save_pretrained(tmp_path)
    from transformers import AutoTokenizer

    with pytest.raises(ModelError, match="does too much: it makes a text"):
        Renderer(AutoTokenizer.from_pretrained(tmp_path)).render(TURNS)
