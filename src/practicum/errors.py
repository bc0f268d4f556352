"""The error tree: one class with a documented exit code for each kind of failure a user can meet.

    PracticumError                 1
    ├── RecipeError          2   a recipe or a command line that cannot be right
    │   └── CapabilityError  2   a recipe that asks a teacher or backend for something it cannot give
    ├── DataError            3   prompts and task files
    ├── ModelError           4   weights and architectures
    │   └── VocabularyError  4   tokenizers that do not belong together
    ├── TeacherError         5   a teacher that cannot be reached or answers nonsense
    ├── CheckpointError      6   a checkpoint that is missing, damaged or from another run
    ├── NumericError         7   losses and gradients that stopped being numbers
    ├── ResourceError        8   disk, memory, locks
    │   ├── SandboxError     8   isolation of untrusted programs that the machine cannot provide
    │   ├── WorkerLost       8   a process of a cluster that died or did not answer
    │   └── TooFewGpus       8   a cluster with fewer free GPUs than the recipe asks for
    ├── VerifierError        9   a verifier that hangs or breaks
    ├── AlarmError          10   a monitor that stopped the run
    ├── EngineError         11   an engine that does not sample with the student's weights
    └── Interrupted    130/143   a signal; the state has been saved

The text of an error is one line: what is wrong, where (field, row, step or path), why, and how to
fix it.
"""

from collections.abc import Sequence


def suggest_install(extra: str) -> str:
    """Return how to install one of practicum's extras, for the end of a message."""
    return f"in the checkout of practicum, run: pip install -e '.[{extra}]'"


class PracticumError(Exception):
    """Base of every error meant for a user; `exit_code` is what the command line returns.

    `was_shown` is True if the error was already printed, because the end of the run takes long.
    """

    exit_code = 1
    was_shown = False


class RecipeError(PracticumError, ValueError):
    """A recipe or command line that cannot be right; `problems` holds one line per problem."""

    exit_code = 2

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class CapabilityError(RecipeError):
    """A recipe that asks a teacher or a backend for something it cannot give."""


class DataError(PracticumError, ValueError):
    """Prompts or task files that cannot be used."""

    exit_code = 3


class ModelError(PracticumError, ValueError):
    """Weights, architectures or model folders that cannot be used."""

    exit_code = 4


class VocabularyError(ModelError):
    """Two tokenizers that do not belong together."""


class TeacherError(PracticumError, RuntimeError):
    """A teacher that cannot be reached or gives an invalid answer."""

    exit_code = 5


class CheckpointError(PracticumError, RuntimeError):
    """A checkpoint that is missing, damaged or belongs to another run."""

    exit_code = 6


class NumericError(PracticumError, ArithmeticError):
    """A loss or gradient that was not a number, too often to continue."""

    exit_code = 7


class ResourceError(PracticumError, OSError):
    """Disk space, memory or locks that the machine cannot give."""

    exit_code = 8

    def __str__(self) -> str:
        return " ".join(str(part) for part in self.args)


class SandboxError(ResourceError):
    """Isolation of an untrusted program that this machine cannot provide."""


class WorkerLost(ResourceError):
    """A process of a cluster that died, or did not answer in time; the newest checkpoint is kept.

    `restarts` is the number of times that a run may restart automatically after such a loss.
    """

    def __init__(self, message: str, restarts: int = 0) -> None:
        self.restarts = restarts
        super().__init__(message)


class TooFewGpus(ResourceError):
    """A cluster with fewer free GPUs than a recipe asks for.

    `overrides` are the changes with which the recipe fits, empty if no change is enough; a run that
    lost a process continues with them.
    """

    def __init__(self, problem: str, advice: str, overrides: Sequence[str] = ()) -> None:
        self.problem = problem
        self.overrides = tuple(overrides)
        super().__init__(f"{problem}; {advice}")


class VerifierError(PracticumError, RuntimeError):
    """A verifier that hangs or breaks."""

    exit_code = 9


class AlarmError(PracticumError, RuntimeError):
    """A monitor asked the run to stop."""

    exit_code = 10


class EngineError(PracticumError, RuntimeError):
    """An engine that cannot be reached, or does not sample with the student's weights."""

    exit_code = 11


class Interrupted(PracticumError):
    """A signal stopped the run after its state was saved; the exit code is 128 + signal number."""

    def __init__(self, signal_number: int, message: str) -> None:
        self.exit_code = 128 + signal_number
        super().__init__(message)
