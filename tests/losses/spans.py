"""A student of letters and a teacher of pairs of letters with random states, for signals that read spans of text."""

from dataclasses import dataclass, replace

import torch

from practicum.functional.head import Head
from practicum.objective import Full
from practicum.teachers.translated import TranslatedTeacher
from practicum.text import TOKENIZERS, Renderer
from practicum.text.translation import TranslatedText, Translator
from practicum.types import Rollout, TeacherSignal
from tests.teachers.recorder import Recorder, prompt, rollout

LETTERS = "abc"
STOP = frozenset({2})
SHORT = Renderer(TOKENIZERS["characters"](LETTERS), stop_ids=STOP)
LONG = Renderer(TOKENIZERS["pairs"](LETTERS), stop_ids=STOP)


@dataclass(frozen=True)
class Scored:
    """An answer, its translation and its signal, and the teacher's log-probabilities at its own tokens."""

    signal: TeacherSignal
    text: TranslatedText
    tokens: torch.Tensor
    rows: torch.Tensor


def write(renderer: Renderer, text: str) -> Rollout:
    """Return a rollout with a text and the stop token."""
    tokens = torch.tensor([*renderer.encode_answer_text(text), 2])
    zeros = torch.zeros(len(tokens))
    return replace(
        rollout(prompt("p"), text=text),
        tokens=tokens,
        loss_mask=torch.ones_like(tokens, dtype=torch.bool),
        sampling_logprobs=zeros,
        policy_logprobs=zeros,
    )


def score(question: Full, text: str, student: Renderer, teacher: Renderer, seed: int) -> Scored:
    """Score a text by a teacher with random hidden states and a random linear head."""
    generator = torch.Generator().manual_seed(seed)
    head = Head(torch.randn(teacher.vocab_size, 5, generator=generator), teacher.vocab_size)
    states = torch.randn(40, 5, generator=generator)

    class Model(Recorder):
        def score(self, rollouts, signal):
            return [TeacherSignal(hidden=states[: len(one.tokens)], head=head) for one in rollouts]

    translator = Translator(student, teacher, credit="span")
    one = write(student, text)
    (signal,) = TranslatedTeacher(Model(), translator).score([one], question)
    translated = translator.translate(one.tokens.tolist())
    rows = head.logprobs(states[: len(translated.tokens)])
    return Scored(signal, translated, torch.tensor(translated.tokens), rows)
