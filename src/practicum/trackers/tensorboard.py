"""TensorBoard event files in the run folder; `tensorboard --logdir runs` shows them."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from practicum.errors import ResourceError
from practicum.trackers import Tracker, TrackerContext, client


class Config(BaseModel):
    """Where the event files go."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    type: Literal["tensorboard"] = "tensorboard"
    folder: str | None = Field(default=None, description="none: `tensorboard` in the run folder")


class TensorBoard:
    """One folder of event files; a resumed run writes all of its steps anew, since a killed one loses the last minutes."""

    def __init__(self, config: Config, context: TrackerContext, module: Any) -> None:
        self._folder = config.folder or str(context.home / "tensorboard")
        self._writer_of = module.SummaryWriter
        self._settings = context.settings
        self._writer: Any = None
        self._last = 0

    def begin(self, first_step: int) -> int:
        """Open a new event file that overrules the earlier ones."""
        try:
            self._writer = self._writer_of(self._folder, purge_step=1)
            rows = "\n".join(f"| {name} | {value} |" for name, value in self._settings.items())
            self._writer.add_text("recipe", f"| key | value |\n| --- | --- |\n{rows}", 1)
        except OSError as error:
            raise ResourceError(
                f"tensorboard: {self._folder} cannot be written ({error})"
            ) from error
        return 0

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One scalar a metric."""
        self._last = step
        try:
            for name, value in metrics.items():
                self._writer.add_scalar(name, value, step)
        except OSError as error:
            raise ResourceError(
                f"tensorboard: {self._folder} cannot be written ({error})"
            ) from error

    def finish(self, summary: Mapping[str, float]) -> None:
        """Scalars at the last step."""
        self.log(self._last, summary)

    def close(self) -> None:
        """Flush the event file."""
        self._writer.close()


def build(config: Config, context: TrackerContext) -> Tracker:
    """Find the package."""
    client("tensorboard")
    return TensorBoard(config, context, client("torch.utils.tensorboard", "tensorboard"))
