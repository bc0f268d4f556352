"""Short chat templates for tests, each with one property of a family of published templates."""

from collections.abc import Mapping

ENDS = ("<|im_end|>",)
_TURN = "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
_LOOP = "{% for m in messages %}"
_GENERATION = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
_BLOCK = "{{ '<think>\\n' + r + '\\n</think>\\n\\n' }}"
_READ_THOUGHTS = (
    "{% set r = '' %}{% set c = m.content %}"
    "{% if m.reasoning_content is string %}{% set r = m.reasoning_content %}"
    "{% elif '</think>' in c %}{% set r = c.split('</think>')[0].split('<think>')[-1].strip('\\n') %}"
    "{% set c = c.split('</think>')[-1].lstrip('\\n') %}{% endif %}"
)
_CALLS = (
    '{% for t in m.tool_calls or [] %}{{ \'<tool_call>\\n{"name": "\' + t.function.name + \'", "arguments": \' }}'
    "{{ t.function.arguments | tojson }}{{ '}\\n</tool_call>' }}{% endfor %}"
)
_TOOLS = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
_OPENED = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"
_SWITCHED = (
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif %}"
)


def _blocks(answer: str, generation: str) -> str:
    """Build a template of ChatML turns: `answer` writes the last answer from the thoughts `r` and the text `c`."""
    return (
        f"{_TOOLS}{_LOOP}{{% if m.role == 'assistant' %}}{_READ_THOUGHTS}{{{{ '<|im_start|>assistant\\n' }}}}"
        f"{{% if loop.last %}}{answer}{{% else %}}{{{{ c }}}}{{% endif %}}{_CALLS}{{{{ '<|im_end|>\\n' }}}}"
        f"{{% else %}}{_TURN}{{% endif %}}{{% endfor %}}{generation}"
    )


CHATML = f"{_LOOP}{_TURN}{{% endfor %}}{_GENERATION}"
CHANNELS = (
    f"{_LOOP}{{% if m.role == 'assistant' %}}"
    "{% if m.thinking and loop.last %}{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{% endif %}"
    "{{ '<|start|>assistant<|channel|>final<|message|>' + m.content + ('<|return|>' if loop.last else '<|end|>') }}"
    "{% else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
RESPONSE = (
    f"{_LOOP}{{{{ '<|TURN|>' + m.role }}}}{{% if m.role == 'assistant' %}}"
    "{{ '<|START_RESPONSE|>' + m.content + '<|END_RESPONSE|>' }}{% else %}{{ m.content }}{% endif %}{{ '<|END|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|TURN|>assistant' }}{% endif %}"
)
NO_END = (
    f"{_TOOLS}{_LOOP}{{{{ '<|' + m.role + '|>\\n' }}}}{{% if m.role == 'assistant' %}}{_READ_THOUGHTS}"
    "{{ '<think>' + (r if loop.last else '') + '</think>\\n' + c.strip() }}{% for t in m.tool_calls or [] %}"
    "{{ '\\n<tool_call>' + t.function.name + '\\n' }}{% for k, v in t.function.arguments.items() %}"
    "{{ '<arg_key>' + k + '</arg_key>\\n<arg_value>' }}{{ v if v is string else v | tojson }}{{ '</arg_value>\\n' }}{% endfor %}"
    "{{ '</tool_call>' }}{% endfor %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '\\n<think></think>' }}{% endif %}{% endif %}"
)
STRIPS = (
    f"{_LOOP}{{% set c = m.content %}}{{% if not loop.last %}}{{% set c = c.split('</think>')[-1].strip() %}}{{% endif %}}"
    "{{ '<|im_start|>' + m.role + '\\n' }}{% if m.thinking and loop.last %}{{ '<think>' + m.thinking + '</think>' }}{% endif %}"
    f"{{{{ c + '<|im_end|>\\n' }}}}{{% endfor %}}{_GENERATION}"
)
TRIMS = (
    f"{{{{ bos_token }}}}{_LOOP}{{{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) }}}}"
    "{{ '\\n' + m.content | trim }}"
    "{{ '<end_of_turn>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
)
INST = (
    f"{{{{ bos_token }}}}{_LOOP}{{% if m.role == 'user' %}}{{{{ '[INST] ' + m.content + ' [/INST]' }}}}"
    "{% elif m.role == 'assistant' %}{{ ' ' + m.content + '</s>' }}"
    "{% else %}{{ raise_exception('only two roles') }}{% endif %}{% endfor %}"
)
TWO_ENDS = (
    f"{_LOOP}{{{{ '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' }}}}{{% endfor %}}"
    "{{ '<|assistant|>\\n' if add_generation_prompt else eos_token }}"
)
RECIPIENTS = (
    f"{_LOOP}{{{{ '<|start|>' + m.role }}}}{{% if m.role == 'assistant' %}}{{% if m.reasoning_content %}}"
    "{{ ' to=self<|message|>' + m.reasoning_content + '<|eom|><|start|>assistant' }}{% endif %}{{ ' to=user' }}{% endif %}"
    "{{ '<|message|>' + m.content + '<|eot|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
PARTS = (
    f"{_LOOP}{{{{ m.role + ': ' }}}}{{% for part in m.content if part.type == 'text' %}}{{{{ part.text }}}}{{% endfor %}}"
    "{{ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)

TEMPLATES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "plain turns": (CHATML, ENDS),
    "a system turn by default": (
        "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\\nBe kind.<|im_end|>\\n' }}{% endif %}"
        + CHATML,
        ENDS,
    ),
    "the prompt opens thoughts": (_blocks(_BLOCK + "{{ c }}", _OPENED), ENDS),
    "the prompt opens thoughts, conversations drop them": (_blocks("{{ c }}", _OPENED), ENDS),
    "the prompt opens thoughts, answers keep them as text": (
        f"{_LOOP}{_TURN}{{% endfor %}}{_OPENED}",
        ENDS,
    ),
    "the prompt opens thoughts, an empty block is short": (
        _blocks(
            "{{ '<think>\\n' + r + '\\n</think>\\n' if r else '<think></think>' }}{{ c }}", _OPENED
        ),
        ENDS,
    ),
    "an empty block where nothing is thought": (_blocks(_BLOCK + "{{ c }}", _SWITCHED), ENDS),
    "thoughts only by their key": (
        _blocks(_BLOCK + "{{ c }}", _OPENED).replace("'</think>' in c", "false"),
        ENDS,
    ),
    "channels": (CHANNELS, ("<|return|>", "<|call|>")),
    "marks around the answer": (RESPONSE, ("<|END|>",)),
    "marks around the answer, opened by the prompt": (
        RESPONSE.replace("'<|TURN|>assistant'", "'<|TURN|>assistant<|START_RESPONSE|>'"),
        ("<|END|>",),
    ),
    "no end token": (NO_END, ("<|endoftext|>", "<|user|>")),
    "earlier thoughts are stripped": (STRIPS, ENDS),
    "trimmed texts": (TRIMS, ("<end_of_turn>",)),
    "instructions in brackets": (INST, ("</s>",)),
    "two end tokens": (TWO_ENDS, ("<|end|>",)),
    "recipients": (RECIPIENTS, ("<|eot|>",)),
    "lists of parts": (PARTS, ENDS),
}
"""Templates by their property, with their end tokens."""
