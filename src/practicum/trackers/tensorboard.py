"""TensorBoard event files in the run folder; `tensorboard --logdir runs` shows them."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

from pydantic import Field

from practicum.errors import ResourceError
from practicum.trackers import Tracker, TrackerContext, import_client
from practicum.types import FrozenConfig


class Config(FrozenConfig):
    """The folder of the event files."""

    type: Literal["tensorboard"] = "tensorboard"
    folder: str | None = Field(default=None, description="none: `tensorboard` in the run folder")


class TensorBoard:
    """One folder of event files; see `Tracker`."""

    def __init__(self, config: Config, context: TrackerContext, module: Any) -> None:
        self._folder = config.folder or str(context.run_dir / "tensorboard")
        self._writer_class = module.SummaryWriter
        self._settings = context.settings
        self._writer: Any = None
        self._last_step = 0

    def begin(self, first_step: int) -> int:
        """Open a new event file that replaces the earlier ones."""
        rows = "\n".join(f"| {name} | {value} |" for name, value in self._settings.items())
        with self._translate_failures():
            self._writer = self._writer_class(self._folder, purge_step=1)
            self._writer.add_text("recipe", f"| key | value |\n| --- | --- |\n{rows}", 1)
        # A killed run loses the events of its last minutes, so a resume sends every step again.
        return 0

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write each metric as a scalar."""
        self._last_step = step
        with self._translate_failures():
            for name, value in metrics.items():
                self._writer.add_scalar(name, value, step)

    def finish(self, summary: Mapping[str, float], verdict: str) -> None:
        """Write the final numbers as scalars of the last step, and the verdict as a text."""
        self.log(self._last_step, summary)
        with self._translate_failures():
            self._writer.add_text("final/verdict", verdict, self._last_step)

    def close(self) -> None:
        """Flush the event file."""
        self._writer.close()

    @contextmanager
    def _translate_failures(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ResourceError(
                f"tensorboard: {self._folder} cannot be written ({error})"
            ) from error


def build(config: Config, context: TrackerContext) -> Tracker:
    """Import TensorBoard and its writer in torch, and build the tracker."""
    import_client("tensorboard")
    return TensorBoard(config, context, import_client("torch.utils.tensorboard", "tensorboard"))
