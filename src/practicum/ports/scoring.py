"""The protocols of scorers: they give one number per rollout or per token, and may be trained.

A new scorer is one file in `practicum/scorers`, or your own module: see docs/scorers.md.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from practicum.models.config import StudentConfig
from practicum.ports import (
    PartConfig,
    ScalarModel,
    StepFollower,
    Task,
    Teacher,
)
from practicum.ports.notes import Note, name_note_role
from practicum.text import Renderer
from practicum.types import Judgement, Metrics, Rollout


class ScorerSettings(PartConfig):
    """The settings of a scorer in a recipe; a subclass has a field `type` with its name as default."""

    @property
    def follows_student(self) -> bool:
        """True if its judgements change in a run, so that it is never called ahead of its step."""
        return True

    @property
    def reads_verifier(self) -> bool:
        """True if it learns from the verifier's rewards or passes them on."""
        return False

    @property
    def shows_reference(self) -> bool:
        """True if it judges an answer with the row's own answer in view."""
        return False

    @property
    def loads_scalar(self) -> bool:
        """True if the scorer loads a model with one output number per token."""
        return False

    @property
    def scalar_model(self) -> StudentConfig | None:
        """The settings of that model; None: the student's settings."""
        return None

    @property
    def rejects(self) -> bool:
        """True if the scorer has `count_accepted` with these settings."""
        return False

    @property
    def notes_read(self) -> tuple[str, ...]:
        """The names of the recipe's notes that it shows to its judge."""
        return ()

    @property
    def imitates_teacher(self) -> bool:
        """True if it learns to prefer the teacher's answers."""
        return False


class Scorer(StepFollower):
    """A judge of rollouts. By default it learns nothing and has no state.

    `save_state` and `load_state` work as in a `StepFollower`, and `after_step` is called too.
    """

    def score(self, rollouts: Sequence[Rollout]) -> list[Judgement]:
        """Return one judgement per rollout, in order."""
        raise NotImplementedError

    def fit(self, rollouts: Sequence[Rollout]) -> Metrics:
        """Learn from a step's rollouts, after the student's update; return the metrics to report.

        The rollouts have their rewards and all judgements. Scorers that override this method have
        settings with `follows_student`.
        """
        return {}

    def add_gradient(self, rollouts: Sequence[Rollout]) -> None:
        """Add a gradient to the student's before each of its optimizer steps; by default none.

        `rollouts` are the rollouts of the student's mini-batch.
        """

    @property
    def rejects(self) -> bool:
        """Return True if it rejects answers, see `count_accepted`."""
        return type(self).count_accepted is not Scorer.count_accepted

    def count_accepted(self, rollouts: Sequence[Rollout]) -> list[int | None]:
        """Return the number of tokens after which each answer is rejected; None: it is not
        rejected.

        0 rejects the whole answer. The rollouts may have no rewards yet. The settings say whether
        the scorer rejects answers.
        """
        raise NotImplementedError

    def build_variants(self) -> "Mapping[str, Scorer]":
        """Return variants of the scorer by name: unchanged under `nothing`, and with its question
        reworded.

        All variants should give the same grades. Empty if the question has only one wording.
        """
        return {}


@dataclass(frozen=True, slots=True)
class ScorerContext:
    """The objects from which a scorer is built."""

    name: str
    """Its name in the recipe."""
    renderer: Renderer
    """The student's renderer: turns messages into tokens."""
    task: Task
    """The source of the prompts, with the verifier."""
    seed: int
    """The seed of everything random in this scorer."""
    load_scalar: Callable[[StudentConfig | None], ScalarModel]
    """Load a model with one output number per token; None: the student's initial weights.

    It reads the student's tokens. Raises VocabularyError if its vocabulary differs.
    """
    build_teacher: Callable[[Any], Teacher]
    """Build a teacher by its settings, such as one that judges in words; its costs are counted
    under the scorer's name."""
    share_student: Callable[[], ScalarModel]
    """Return one output number per token on the student's own body, see `Backend.share_student`.

    Raises CapabilityError if the student is in another process."""
    earlier: tuple[str, ...] = ()
    """The scorers before it in the recipe; its rollouts have their judgements."""
    base_dir: Path = Path()
    """The folder at which relative paths of the recipe start."""
    scores_dir: Path | None = None
    """The run's folder for cached answers; None: no cache."""
    at_end: ExitStack = field(default_factory=ExitStack)
    """Resources to close after the last scoring, also after an error."""
    register_file: Callable[[Path], None] = lambda path: None
    """Register a file that changes the judgements; a resumed run checks its digest."""
    is_dry_run: bool = False
    """True if models are weightless."""


def list_followers(
    teacher: Teacher,
    reference: Teacher | None,
    scorers: Mapping[str, Scorer],
    notes: Mapping[str, Note],
) -> dict[str, StepFollower]:
    """Return teacher, reference, scorers and notes by role: they follow steps and have state."""
    followers: dict[str, StepFollower] = {"teacher": teacher}
    if reference is not None:
        followers["reference"] = reference
    followers |= {name_role(name): scorer for name, scorer in scorers.items()}
    return followers | {name_note_role(name): note for name, note in notes.items()}


def name_role(scorer: str) -> str:
    """Return the role of a scorer, under which its costs and its state are kept."""
    return f"scorer-{scorer}"
