"""The end of a model's thoughts and the beginning of its answer, by the marks of chat templates."""

THOUGHTS = (
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|inner_prefix|>", "<|inner_suffix|>"),
    ("<|channel>thought", "<channel|>"),
    ("<|channel|>analysis<|message|>", "<|channel|>final<|message|>"),
)
"""The text before and after a model's thoughts, for each family of chat templates."""


def read_answer(text: str, opened: bool = False) -> str:
    """Return what a completion says after its thoughts; nothing if the thoughts never end.

    With `opened` the prompt's template has opened the thoughts, so the text begins inside them.
    """
    start, is_inside = _find_answer(text, opened)
    return "" if is_inside else text[start:]


def is_thinking(prompt: str) -> bool:
    """Return True if the text of a rendered prompt ends inside thoughts that it opened."""
    return _find_answer(prompt, False)[1]


def _find_answer(text: str, opened: bool) -> tuple[int, bool]:
    """Return the end of the last mark that closes thoughts, and True if thoughts are open there."""
    closed = max((text.rfind(end) + len(end) for _, end in THOUGHTS if end in text), default=0)
    reopened = any(text.rfind(begin) >= closed for begin, _ in THOUGHTS)
    return closed, reopened or (opened and not closed)
