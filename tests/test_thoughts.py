import pytest
from hypothesis import given
from hypothesis import strategies as st

from practicum.rows import PromptSet
from practicum.thoughts import THOUGHTS, is_thinking, read_answer
from practicum.types import Message, Prompt, Rollout

WORDS = st.text(alphabet="abc 012\n", max_size=8)


@given(st.sampled_from(THOUGHTS), WORDS, WORDS)
def test_the_answer_is_what_follows_the_thoughts(
    marks: tuple[str, str], thoughts: str, answer: str
) -> None:
    begin, end = marks
    assert read_answer(f"{begin}{thoughts}{end}{answer}") == answer
    assert read_answer(f"{thoughts}{end}{answer}") == answer
    assert read_answer(f"{thoughts}{end}{answer}", opened=True) == answer
    assert read_answer(f"{begin}a{end}b{begin}{thoughts}{end}{answer}") == answer
    assert read_answer(f"{begin}{thoughts}") == ""
    assert read_answer(f"{begin}{thoughts}{end}{answer}{begin}{thoughts}") == ""
    assert read_answer(answer) == answer and read_answer(answer, opened=True) == ""


@pytest.mark.parametrize(
    ("prompt", "opens"),
    [
        ("<|im_start|>assistant\n<think>\n", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("<|im_start|>assistant\n", False),
        ("<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_THINKING|>", True),
        ("<|START_THINKING|><|END_THINKING|>", False),
    ],
)
def test_a_prompt_that_opens_thoughts_is_known(prompt: str, opens: bool) -> None:
    assert is_thinking(prompt) == opens


def test_a_task_judges_the_answer_and_a_function_of_the_user_reads_all() -> None:
    prompt = Prompt("p", (Message("user", "?"),), answer="42")
    task = PromptSet([prompt], [])
    assert task.reward(Rollout.from_text(prompt, "<think>41</think>\n42")) == 1.0
    assert task.reward(Rollout.from_text(prompt, "<think>42")) == 0.0
    read: list[str] = []

    def grade(reply: str, prompt: Prompt) -> float:
        read.append(reply)
        return 1.0

    for own in (False, True):
        task = PromptSet([prompt], [], grade=grade, reads_thoughts=own)
        task.reward(Rollout.from_text(prompt, "<think>41</think>42"))
    assert read == ["42", "<think>41</think>42"]
