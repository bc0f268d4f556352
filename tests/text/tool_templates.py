"""Short chat templates with tools, one in the style of each family of models, over a byte tokenizer."""

from test_renderer import byte_tokenizer

from practicum.prompts import ToolSchema, ToolUse
from practicum.text import Renderer

OPEN = "{{ '<|im_start|>' + m.role + '\\n' }}"
HERMES = (
    "{% if tools %}{{ '<|im_start|>system\\n' }}{% for t in tools %}{{ t | tojson }}{% endfor %}"
    "{{ '<|im_end|>\\n' }}{% endif %}{% for m in messages %}"
    "{% if m.role == 'tool' %}{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}"
    "{% endif %}{{ '\\n<tool_response>' + m.content + '</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}"
    f"{{% else %}}{OPEN}{{{{ m.content }}}}"
    '{% for c in m.tool_calls or [] %}{{ \'<tool_call>\\n{"name": "\' + c.function.name + \'", "arguments": \' }}'
    "{{ c.function.arguments | tojson }}{{ '}\\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
XML = HERMES.replace(
    '{{ \'<tool_call>\\n{"name": "\' + c.function.name + \'", "arguments": \' }}'
    "{{ c.function.arguments | tojson }}{{ '}\\n</tool_call>' }}",
    "{{ '<tool_call>\\n<function=' + c.function.name + '>\\n' }}{% for k, v in c.function.arguments.items() %}"
    "{{ '<parameter=' + k + '>\\n' }}{{ v if v is string else v | tojson }}{{ '\\n</parameter>\\n' }}{% endfor %}"
    "{{ '</function>\\n</tool_call>' }}",
)
JSON = (
    HERMES.replace("<tool_call>\\n", "")
    .replace("\\n</tool_call>", "")
    .replace('"arguments"', '"parameters"')
)
MISTRAL = (
    "{% for m in messages %}{% if tools and loop.last %}{{ '[AVAILABLE_TOOLS]' }}{{ tools | tojson }}{% endif %}"
    "{% if m.role == 'user' %}{{ '[INST]' + m.content + '[/INST]' }}"
    "{% elif m.role == 'tool' %}{% if not messages[loop.index0 - 1].tool_calls and messages[loop.index0 - 1].role != 'tool' %}"
    "{{ raise_exception('a result without a call') }}{% endif %}"
    "{{ '[TOOL_RESULTS]{\"content\": ' }}{{ m.content | tojson }}{{ ', \"call_id\": \"' + m.tool_call_id + '\"}[/TOOL_RESULTS]' }}"
    "{% elif m.tool_calls %}{{ '[TOOL_CALLS] [' }}{% for c in m.tool_calls %}{{ '{\"name\": \"' + c.function.name }}"
    '{{ \'", "arguments": \' }}{{ c.function.arguments | tojson }}{{ \', "id": "\' + c.id + \'"}\' }}'
    "{{ ', ' if not loop.last else '' }}{% endfor %}{{ ']<|im_end|>' }}"
    "{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{% endfor %}"
)
PYTHONIC = (
    "{% if tools %}{{ 'func_name1(x=y)' }}{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}{% for m in messages %}"
    + OPEN
    + "{{ m.content }}{% if m.tool_calls %}{{ '[' }}{% for c in m.tool_calls %}{{ c.function.name + '(' }}"
    "{% for k, v in c.function.arguments.items() %}{{ k + '=' }}{{ v | tojson }}{{ ', ' if not loop.last else '' }}{% endfor %}"
    "{{ ')' }}{{ ', ' if not loop.last else '' }}{% endfor %}{{ ']' }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
GLM = HERMES.replace(
    '{{ \'<tool_call>\\n{"name": "\' + c.function.name + \'", "arguments": \' }}'
    "{{ c.function.arguments | tojson }}{{ '}\\n</tool_call>' }}",
    "{{ '<tool_call>' + c.function.name + '\\n' }}{% for k, v in c.function.arguments.items() %}"
    "{{ '<arg_key>' + k + '</arg_key>\\n<arg_value>' }}{{ v if v is string else v | tojson }}{{ '</arg_value>\\n' }}{% endfor %}"
    "{{ '</tool_call>' }}",
)
LFM = (
    PYTHONIC.replace("func_name1(x=y)", "List of tools: ")
    .replace("{{ '[' }}", "{{ '<|tool_call_start|>[' }}")
    .replace("{{ ']' }}", "{{ ']<|tool_call_end|>' }}")
)
TEMPLATES = {
    "hermes": HERMES,
    "xml": XML,
    "glm": GLM,
    "json": JSON,
    "mistral": MISTRAL,
    "lfm": LFM,
    "pythonic": PYTHONIC,
}

SEARCH = ToolSchema(
    "search",
    "Find <|im_end|> pages.",
    {
        "type": "object",
        "properties": {"query": {"type": "string"}, "most": {"type": "integer"}},
        "required": ["query"],
    },
)
CLOCK = ToolSchema("clock", "Tell the time.", {"type": "object", "properties": {}})
USE = ToolUse((SEARCH, CLOCK))


def renderer(form: str) -> Renderer:
    """Return a renderer with two tools and a template that writes calls in this form."""
    plain = Renderer(byte_tokenizer(TEMPLATES[form]), stop_ids=frozenset({258}))
    return plain.with_tools(USE)
