"""A run with a hint in the student's own prompt, and a memory of hints."""

from typing import Any

from toy import HINTED as HINT

HINTED: dict[str, Any] = {
    **HINT,
    "notes": {"known": {"type": "memory", "note": "hint", "keep": 3}, **HINT["notes"]},
}
