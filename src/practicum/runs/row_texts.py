"""Count rows with a model's control tokens in their texts, such as templated prompts and ended answers."""

from collections.abc import Sequence

from practicum.text import Renderer
from practicum.types import Message, Prompt


def describe_texts(prompts: Sequence[Prompt], renderer: Renderer) -> list[str]:
    """Return one note for each way in which texts of the prompts' rows name control tokens."""
    templated = sum(
        any(renderer.names_control(turn.content) for turn in prompt.messages) for prompt in prompts
    )
    answers = [
        renderer.strip_end(Message("assistant", prompt.response))
        for prompt in prompts
        if prompt.response is not None
    ]
    responses = [prompt.response for prompt in prompts if prompt.response is not None]
    ended = sum(answer.content != text for answer, text in zip(answers, responses, strict=True))
    inside = sum(renderer.names_control(answer.content) for answer in answers)
    respelled = sum(not renderer.restores(prompt.messages) for prompt in prompts)
    counts = {
        "stored prompts are rendered to other tokens than before: the student's tokenizer, template "
        "or system turn differs": respelled,
        "prompts name control tokens of the student, which stay text: a prompt that has a chat "
        "template's text already gets it twice; write only the texts of the turns": templated,
        "responses end with an end token as text, which is removed": ended,
        "responses name control tokens of the student, which stay text": inside,
    }
    return [f"{count} of {len(prompts)} {what}" for what, count in counts.items() if count]
