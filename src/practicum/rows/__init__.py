"""From files with rows to prompts: reading, formats, conversations, and rejected rows."""

from practicum.rows.answered import PromptSet, keep_answer
from practicum.rows.prompt_reader import describe_long_answers
from practicum.rows.row_files import count_rows

__all__ = ["PromptSet", "count_rows", "describe_long_answers", "keep_answer"]
