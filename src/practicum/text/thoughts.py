"""Thoughts in the text of an answer, between `<think>` and `</think>`."""

OPEN, CLOSE = "<think>", "</think>"


def split_thoughts(text: str) -> tuple[str | None, str | None]:
    """Return the thoughts at the beginning of an answer, and the text after them.

    The thoughts are None if the answer has none. The text is None if the answer ends within its
    thoughts. `</think>` without `<think>` ends thoughts that the prompt began.
    """
    before, is_open, inner = text.partition(OPEN)
    if is_open and not before.strip():
        thoughts, is_closed, content = inner.partition(CLOSE)
        return thoughts.strip("\n"), content.lstrip("\n") if is_closed else None
    thoughts, is_closed, content = text.partition(CLOSE)
    if is_closed and OPEN not in thoughts:
        return thoughts.strip("\n"), content.lstrip("\n")
    return None, text


def join_thoughts(thoughts: str | None, text: str | None) -> str:
    """Return an answer as one text, with its thoughts between `<think>` and `</think>`."""
    if thoughts is None:
        return text or ""
    return f"{OPEN}\n{thoughts}" + ("" if text is None else f"\n{CLOSE}\n\n{text}")
