"""A teacher that is a Python object: a `Teacher`, or any object with `score(rollouts, signal)`.

`score` returns one `TeacherSignal` per rollout, or one tensor of log-probabilities: [T] of the
rollout's tokens, or [T, V] of all tokens at each position.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, Protocol, get_args, runtime_checkable

import torch
from torch import Tensor

from practicum.errors import PracticumError, TeacherError
from practicum.foreign import describe_error, name_object
from practicum.functional.head import TableHead
from practicum.models.tensors import SavedTensor
from practicum.objective import Full, Sampled, Signal, TopK
from practicum.objective.signal_call import SignalName
from practicum.ports import (
    Capabilities,
    PromptedClient,
    Teacher,
    TeacherConfig,
    TeacherContext,
    TeacherRequest,
)
from practicum.ports.given._config import GivenConfig
from practicum.types import Datum, Prompt, Rollout, Sample, SamplingParams, TeacherSignal

ROUNDING = 1e-3
"""The largest log-probability above 0 that counts as rounding."""

TOKENS = Capabilities(signals=frozenset({"sampled"}), writes=False)
"""The capabilities of an object that gives one log-probability per token."""

DISTRIBUTIONS = Capabilities(signals=frozenset(get_args(SignalName)), writes=False)
"""The capabilities of an object that gives the log-probabilities of all tokens."""

ANYTHING = Capabilities(signals=DISTRIBUTIONS.signals)
"""The capabilities of an object before its first call, or if it only existed in its run."""


@runtime_checkable
class ScoresRollouts(Protocol):
    """An object that scores rollouts."""

    def score(self, rollouts: Sequence[Rollout], signal: Signal) -> Sequence[Any]:
        """Return one `TeacherSignal` or tensor of log-probabilities per rollout."""
        ...


class Config(TeacherConfig, GivenConfig):
    """The settings of a teacher that is an object."""

    role: ClassVar[str] = "teacher"
    accepted: ClassVar[str] = (
        "a path, a hub name, a mapping, (model, tokenizer), or an object with score(rollouts, signal)"
    )
    type: Literal["practicum.ports.given.teacher"] = "practicum.ports.given.teacher"

    @classmethod
    def accepts(cls, entry: Any) -> bool:
        """Return True if an object scores rollouts."""
        return isinstance(entry, ScoresRollouts) and not isinstance(entry, type)

    def capabilities(self) -> Capabilities:
        """Return the object's declared capabilities; others are known after its first answer."""
        return self.object.capabilities if isinstance(self.object, Teacher) else ANYTHING


class GivenTeacher(Teacher):
    """A teacher around the user's object, which checks each signal."""

    def __init__(self, entry: ScoresRollouts, vocab_size: int) -> None:
        self._capabilities = entry.capabilities if isinstance(entry, Teacher) else ANYTHING
        self._entry = entry
        self._teacher = entry if isinstance(entry, Teacher) else None
        self._name = name_object(entry)
        self._vocab_size = vocab_size

    @property
    def capabilities(self) -> Capabilities:
        """The object's declared capabilities, or the capabilities that its first answer shows."""
        return self._capabilities

    def try_out(self, prompt: Prompt, prompt_tokens: tuple[int, ...]) -> None:
        """Score two tokens to infer the capabilities of an object that declares none."""
        if self._teacher is not None:
            return
        tokens = torch.tensor([0, min(1, self._vocab_size - 1)])
        zeros = torch.zeros(2)
        rollout = Rollout(
            prompt, prompt_tokens, tokens, torch.ones(2).bool(), zeros, zeros, 0, "stop", ""
        )
        (signal,) = self.score([rollout], Sampled())
        self._capabilities = TOKENS if signal.head is None else DISTRIBUTIONS

    def score(self, rollouts: Sequence[Rollout], signal: Signal) -> list[TeacherSignal]:
        """Return the object's signals; raise TeacherError if they are invalid."""
        try:
            answers = self._entry.score(rollouts, signal)
        except (PracticumError, torch.OutOfMemoryError):
            raise
        # The user's code may raise anything.
        except Exception as error:
            raise TeacherError(f"teacher {self._name}: {describe_error(error)}") from error
        if not isinstance(answers, Sequence) or len(answers) != len(rollouts):
            count = len(answers) if isinstance(answers, Sequence) else type(answers).__name__
            raise TeacherError(
                f"teacher {self._name}: score() returned {count} for {len(rollouts)} rollouts; "
                "return a list with one TeacherSignal or tensor of log-probabilities per rollout"
            )
        return [
            self._read(answer, rollout, signal)
            for answer, rollout in zip(answers, rollouts, strict=True)
        ]

    def _read(self, answer: Any, rollout: Rollout, signal: Signal) -> TeacherSignal:
        """Return one checked signal."""
        count = len(rollout.tokens)
        if isinstance(answer, Tensor):
            answer = self._wrap(answer, count)
        if not isinstance(answer, TeacherSignal):
            raise self._refuse(
                rollout, f"a {type(answer).__name__}; return a TeacherSignal or a tensor"
            )
        parts = {
            "logprobs": answer.logprobs,
            "topk_ids": answer.topk_ids,
            "topk_logprobs": answer.topk_logprobs,
            "hidden": answer.hidden,
        }
        for name, part in parts.items():
            if part is not None and len(part) != count:
                raise self._refuse(
                    rollout, f"{len(part)} rows of {name} for {count} tokens; return one per token"
                )
        for name in ("logprobs", "topk_logprobs"):
            numbers = parts[name]
            if isinstance(numbers, Tensor) and not bool((numbers <= ROUNDING).all()):
                wrong = numbers[~(numbers <= ROUNDING)][0].item()
                raise self._refuse(
                    rollout, f"{wrong:.4g} in {name}; return log-probabilities, at most 0"
                )
        head = answer.head
        if head is not None and answer.outside is None and head.vocab_size != self._vocab_size:
            raise self._explain_vocabulary(head.vocab_size)
        lacks = {
            Full: head is None,
            TopK: head is None and answer.topk_ids is None,
            Sampled: head is None and answer.logprobs is None,
        }
        if not answer.is_empty and lacks.get(type(signal), False):
            raise self._refuse(
                rollout,
                f"no {signal.name} signal; return log-probabilities [T, V], or set objective.signal: sampled",
            )
        return answer

    def _wrap(self, logprobs: Tensor, count: int) -> TeacherSignal:
        """Return log-probabilities [T] or [T, V] as a signal."""
        logprobs = logprobs.detach()
        if logprobs.dim() < 2:
            return TeacherSignal(logprobs=logprobs.reshape(-1).float())
        table = logprobs.float()
        if table.shape[-1] != self._vocab_size:
            raise self._explain_vocabulary(table.shape[-1])
        # Normalizing probabilities or logits would hide the mistake.
        mass = table.exp().sum(dim=-1)
        if not bool(((mass - 1).abs() < ROUNDING).all()):
            raise TeacherError(
                f"teacher {self._name}: probabilities that sum to {mass[0].item():.4g} at a position; "
                "return log-probabilities, torch.log_softmax(logits, dim=-1)"
            )
        rows = torch.arange(len(table), dtype=torch.float32)
        return TeacherSignal(hidden=rows[:, None], head=TableHead(table))

    def _refuse(self, rollout: Rollout, problem: str) -> TeacherError:
        return TeacherError(
            f"teacher {self._name}: for prompt {rollout.prompt.id!r} score() returned {problem}"
        )

    def _explain_vocabulary(self, size: int) -> TeacherError:
        return TeacherError(
            f"teacher {self._name}: it scores {size} tokens and the student has "
            f"{self._vocab_size}; return one column per token id of the student"
        )

    def sample(
        self, requests: Sequence[TeacherRequest], params: SamplingParams
    ) -> list[Sample] | None:
        """Return the object's completions, if it writes."""
        return None if self._teacher is None else self._teacher.sample(requests, params)

    def bind_prompt(self, prompt: Prompt) -> PromptedClient | None:
        """Return the object's client, if it writes."""
        return None if self._teacher is None else self._teacher.bind_prompt(prompt)

    def after_step(self, step: int, data: Sequence[Datum]) -> None:
        """Pass the step to the object, if it follows the student."""
        if self._teacher is not None:
            self._teacher.after_step(step, data)

    def save_state(self) -> Mapping[str, SavedTensor]:
        """Return the object's state."""
        return {} if self._teacher is None else self._teacher.save_state()

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the object's state."""
        if self._teacher is not None:
            self._teacher.load_state(tensors)


def build(config: Config, context: TeacherContext) -> Teacher:
    """Return the object as a teacher, after a trial call if it declares no capabilities."""
    teacher = GivenTeacher(config.load(), context.renderer.vocab_size)
    prompts = context.task.train_prompts() if context.task else ()
    if prompts:
        teacher.try_out(prompts[0], context.renderer.render(prompts[0].messages))
    return teacher
