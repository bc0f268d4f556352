"""The check of the prompts: held-out questions, length, control tokens in texts."""

from collections.abc import Sequence

from practicum.runs.check_outcome import CheckOutcome
from practicum.statistics import wilson
from practicum.studies.doctor.evidence import Evidence
from practicum.text import make_printable
from practicum.text.control import compile_control_pattern
from practicum.types import Prompt

MAX_FAULTY = 0.05
WORD_PUNCTUATION = ".,;:!?\"'`"
NAMED_PROMPTS = 3


def check_data(evidence: Evidence) -> CheckOutcome:
    """P18: Find training questions that are also held out, prompts over the limit, and control
    tokens in texts."""
    components = evidence.components
    prompts = components.parts.task.train_prompts()
    heldout = {_normalize_question(prompt) for prompt in components.parts.task.heldout_prompts()}
    faults = {
        "are also held out, but for case and punctuation": [
            prompt for prompt in prompts if _normalize_question(prompt) in heldout
        ],
        "are too long": components.skipped_prompts,
        "have the name of a control token in their text, which is read as plain text": (
            _find_control_tokens(evidence, prompts)
        ),
    }
    # One prompt can have several faults, and prompts of different rows can be equal: count objects.
    faulty = {id(prompt) for faulty_prompts in faults.values() for prompt in faulty_prompts}
    share = wilson(float(len(faulty)), len(prompts))
    details = {fault: float(len(faulty_prompts)) for fault, faulty_prompts in faults.items()}
    if not faulty:
        text = f"nothing wrong with {len(prompts)} training prompts"
        return CheckOutcome("pass", text, share, "of prompts", details=details)
    texts = [
        f"{len(faulty_prompts)} {fault} ({_list_ids(faulty_prompts)})"
        for fault, faulty_prompts in faults.items()
        if faulty_prompts
    ]
    text = f"of {len(prompts)} training prompts {'; '.join(texts)}"
    fix: tuple[str, ...] = ()
    if components.skipped_prompts:
        fix = (f"prompt_tokens={2 * evidence.recipe.prompt_tokens}",)
    status = "fail" if share.mean > MAX_FAULTY else "warn"
    return CheckOutcome(status, text, share, "of prompts", fix, details=details)


def _normalize_question(prompt: Prompt) -> str:
    """Return a prompt's words without case, punctuation around them, and system turn."""
    questions = [message.content for message in prompt.messages if message.role != "system"]
    words = " ".join(questions).split()
    return " ".join(word.casefold().strip(WORD_PUNCTUATION) for word in words).strip()


def _find_control_tokens(evidence: Evidence, prompts: Sequence[Prompt]) -> list[Prompt]:
    """Return the prompts with the name of a control token in their text."""
    renderer = evidence.renderer
    pattern = compile_control_pattern(
        renderer.tokenizer, str(renderer.template or renderer.tokenizer.chat_template or "")
    )
    if pattern is None:
        return []
    return [
        prompt
        for prompt in prompts
        if any(pattern.search(message.content) for message in prompt.messages)
    ]


def _list_ids(prompts: Sequence[Prompt]) -> str:
    """Return the ids of the first few prompts."""
    names = ", ".join(make_printable(prompt.id) for prompt in prompts[:NAMED_PROMPTS])
    return f"{names}, ..." if len(prompts) > NAMED_PROMPTS else names
