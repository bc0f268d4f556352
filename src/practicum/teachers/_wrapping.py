"""A teacher around another one."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from practicum.objective import Signal
from practicum.ports import Capabilities, Teacher, TeacherRequest, Voice
from practicum.types import Datum, Prompt, Rollout, Sample, SamplingParams, TeacherSignal


class WrappingTeacher(Teacher):
    """Does what the teacher inside does; whoever inherits from it changes what it has to."""

    def __init__(self, inner: Teacher) -> None:
        self._inner = inner

    @property
    def capabilities(self) -> Capabilities:
        """Return those of the teacher inside."""
        return self._inner.capabilities

    def score(self, rollouts: Sequence[Rollout], signal: Signal) -> list[TeacherSignal]:
        """Return the signals of the teacher inside."""
        return self._inner.score(rollouts, signal)

    def sample(self, requests: Sequence[TeacherRequest], params: SamplingParams) -> list[Sample] | None:
        """Return the answers of the teacher inside."""
        return self._inner.sample(requests, params)

    def voice(self, prompt: Prompt) -> Voice | None:
        """Return that of the teacher inside."""
        return self._inner.voice(prompt)

    def after_step(self, step: int, data: Sequence[Datum]) -> None:
        """Pass it on."""
        self._inner.after_step(step, data)

    def save_state(self) -> dict[str, Tensor]:
        """Return that of the teacher inside."""
        return self._inner.save_state()

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Give it to the teacher inside."""
        self._inner.load_state(tensors)
