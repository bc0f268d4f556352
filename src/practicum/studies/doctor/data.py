"""Are the prompts clean: none of them held out as well, none too long, no control tokens in what users wrote?"""

from collections.abc import Sequence

from practicum.statistics import wilson
from practicum.studies.doctor.evidence import Evidence
from practicum.studies.doctor.findings import CheckOutcome
from practicum.text import make_printable
from practicum.text.control import control_pattern
from practicum.types import Prompt

MANY = 0.05
AROUND_WORDS = ".,;:!?\"'`"
SHOWN = 3


def hygiene(evidence: Evidence) -> CheckOutcome:
    """P18: training questions that are held out too, prompts over the limit, names of control tokens in texts."""
    built = evidence.built
    train, heldout = built.parts.task.train_prompts(), built.parts.task.heldout_prompts()
    held = {_normal(prompt) for prompt in heldout}
    twice = [prompt for prompt in train if _normal(prompt) in held]
    control = _with_control_tokens(evidence, train)
    found = {
        "are also held out, but for case and punctuation": twice,
        "are too long": built.too_long,
        "have the name of a control token in their text, which is read as plain text": control,
    }
    rows = {id(prompt) for prompts in found.values() for prompt in prompts}
    share = wilson(float(len(rows)), len(train))
    details = {what: float(len(prompts)) for what, prompts in found.items()}
    if not rows:
        text = f"nothing wrong with {len(train)} training prompts"
        return CheckOutcome("pass", text, share, "of prompts", details=details)
    wrong = [
        f"{len(prompts)} {what} ({_named(prompts)})" for what, prompts in found.items() if prompts
    ]
    text = f"of {len(train)} training prompts {'; '.join(wrong)}"
    fix = (f"prompt_tokens={2 * evidence.recipe.prompt_tokens}",) if built.too_long else ()
    return CheckOutcome(
        "fail" if share.mean > MANY else "warn", text, share, "of prompts", fix, details=details
    )


def _normal(prompt: Prompt) -> str:
    """A question without case, and without the spaces and punctuation around its words."""
    words = [
        word
        for message in prompt.messages
        if message.role != "system"
        for word in message.content.split()
    ]
    return " ".join(word.casefold().strip(AROUND_WORDS) for word in words).strip()


def _with_control_tokens(evidence: Evidence, prompts: Sequence[Prompt]) -> list[Prompt]:
    renderer = evidence.built.learner.renderer
    control = control_pattern(
        renderer.tokenizer, str(renderer.template or renderer.tokenizer.chat_template or "")
    )
    if control is None:
        return []
    return [
        prompt
        for prompt in prompts
        if any(control.search(message.content) for message in prompt.messages)
    ]


def _named(prompts: Sequence[Prompt]) -> str:
    names = ", ".join(make_printable(prompt.id) for prompt in prompts[:SHOWN])
    return f"{names}, ..." if len(prompts) > SHOWN else names
