"""Answers of a chat server, stored on disk by prompt, each with its price.

Every answer is one line of `answers.jsonl`, written when it arrives: no answer is paid for twice,
even if the run is killed in the middle of a call.
"""

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from practicum.errors import ResourceError
from practicum.teaching.chat_protocols import ChatAnswer

log = logging.getLogger(__name__)

FILE = "answers.jsonl"


@dataclass(frozen=True, slots=True)
class KeptAnswer:
    """An answer and its price in money, 0 without prices."""

    answer: ChatAnswer
    money: float


class AnswerStore:
    """The answers of a folder by key; `money` is the price of all of them.

    Without a folder, answers are kept for this process only.
    """

    def __init__(self, folder: Path | None) -> None:
        self.money = 0.0
        self._answers: dict[str, KeptAnswer] = {}
        self._file = None if folder is None else folder / FILE
        if self._file is not None and self._file.exists():
            self._read_lines(self._file)

    def __len__(self) -> int:
        return len(self._answers)

    def get(self, key: str) -> ChatAnswer | None:
        """Return the answer under a key, or None."""
        entry = self._answers.get(key)
        return None if entry is None else entry.answer

    def add(self, key: str, answer: ChatAnswer, money: float) -> None:
        """Keep an answer, and write it to the file at once; ResourceError if that fails."""
        self._put(key, KeptAnswer(answer, money))
        if self._file is None:
            return
        line = json.dumps({"key": key, "money": money, **asdict(answer)})
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with self._file.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        except OSError as error:
            raise ResourceError(
                f"{self._file}: an answer cannot be stored ({error.strerror}); make room, or name "
                "another teacher.folder"
            ) from error

    def _put(self, key: str, entry: KeptAnswer) -> None:
        # Two runs over one folder may have paid for the same answer: the first one is used.
        self._answers.setdefault(key, entry)
        self.money += entry.money

    def _read_lines(self, file: Path) -> None:
        """Read the answers of the file; a line that a kill truncated is skipped, and terminated."""
        text = file.read_text(encoding="utf-8", errors="replace")
        broken = 0
        for line in text.splitlines():
            try:
                fields: Mapping[str, Any] = json.loads(line)
                key, money = fields["key"], fields["money"]
                names = ("text", "is_stopped", "is_refused", "input_tokens", "output_tokens")
                answer = ChatAnswer(**{name: fields[name] for name in names})
            except (ValueError, LookupError, TypeError):
                broken += 1
                continue
            self._put(key, KeptAnswer(answer, float(money)))
        if broken:
            log.warning(f"{file}: {broken} lines are not answers and are skipped")
        # The next answer must not be appended to the truncated line.
        if text and not text.endswith("\n"):
            with file.open("a", encoding="utf-8") as writer:
                writer.write("\n")


def build_key(parts: Mapping[str, Any]) -> str:
    """Return the key of an answer: a digest of everything that it depends on."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
