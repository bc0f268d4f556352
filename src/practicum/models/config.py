"""The settings of a model in a recipe: the source of its weights and the form of its prompts."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, WithJsonSchema, model_validator

from practicum.models.quantization import QuantizationName
from practicum.models.starting_values import CAREFUL
from practicum.types import FrozenConfig

DtypeName = Literal["float32", "bfloat16"]
"""The dtypes of matrix products."""


class PretrainConfig(FrozenConfig):
    """Supervised training of a from-scratch model on the task's answers, before the run begins."""

    steps: int = Field(default=200, ge=0)
    batch: int = Field(default=32, ge=1)
    learning_rate: float = Field(default=3e-3, gt=0)
    question: str | None = Field(
        default=None,
        description="text that replaces the question, with {field} placeholders, as for a privileged teacher",
    )
    loss: float | None = Field(
        default=None,
        gt=0,
        description="end when the mean loss of ten steps is this or less; an error if `steps` do not reach it",
    )


class ScratchConfig(FrozenConfig):
    """A small randomly initialised model with a small tokenizer, made when the run starts."""

    architecture: Literal["llama", "qwen3", "gemma3", "llava", "audioflamingo3", "qwen2_audio"] = (
        Field(
            default="llama",
            description="`llava` also reads pictures, in 16 tokens, and the last two sounds of at most one second",
        )
    )
    tokenizer: Literal["characters", "thoughts", "bytes", "pairs", "doubles", "pieces"] = Field(
        default="characters",
        description="a token for a character of the task; also for each mark of thoughts; for a byte; in the form of "
        "SentencePiece for a pair of characters, for a doubled character, or for a character",
    )
    hidden_size: int = Field(default=64, ge=8, multiple_of=8)
    layers: int = Field(default=2, ge=1)
    heads: int = Field(default=4, ge=1)
    dropout: float = Field(
        default=0.0, ge=0, lt=1, description="attention dropout in its config; `pretrain` uses it"
    )
    padded_vocabulary: int | None = Field(
        default=None, description="rows of the embedding, padding included"
    )
    positions: int = Field(
        default=512, ge=1, description="the longest text in tokens, prompt and answer"
    )
    seed: int = 0
    pretrain: PretrainConfig = PretrainConfig(steps=0)


class MergeConfig(FrozenConfig):
    """A stage's first student: the merged weights of earlier stages' students."""

    merge: tuple[str, ...] = Field(min_length=2, description="the stages")
    method: Literal["mean", "task_arithmetic", "ties"] = "mean"
    base: str = Field(
        default="base", description="the stage that they began from; `mean` does not read it"
    )
    scale: float = Field(default=1.0, gt=0, description="the factor of the joined changes")
    density: float = Field(
        default=0.2, gt=0, le=1, description="the share of each model's changes that `ties` keeps"
    )

    @model_validator(mode="after")
    def _refuse_unused_keys(self) -> Self:
        unused = {"mean": ("scale", "density"), "task_arithmetic": ("density",)}
        for key in unused.get(self.method, ()):
            if key in self.model_fields_set:
                raise ValueError(f"method {self.method} has no {key}; remove it")
        return self


class NewModelConfig(FrozenConfig):
    """A stage's first student: another model than the pipeline's, such as a larger one."""

    model: str | ScratchConfig = Field(
        description="folder of a model, hub name, packaged name, or from-scratch settings"
    )


class ModelConfig(FrozenConfig):
    """A model: a folder of a model, an adapter or a run, a name, or from-scratch settings."""

    model: str | ScratchConfig = Field(
        description="folder of a model, an adapter or a run, hub name, packaged name, or from-scratch "
        "settings"
    )
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    template: str | None = Field(
        default=None, description="a chat template (Jinja) instead of the model's own"
    )
    system: str | None = Field(default=None, description="a system turn before every prompt")
    thinking: bool | None = Field(
        default=None, description="the thinking switch of the template, if it has one"
    )
    stop: tuple[str, ...] = Field(default=(), description="additional tokens that end an answer")
    trust_remote_code: bool = Field(
        default=False, description="run the Python code of the model folder"
    )
    longest_text: int | None = Field(
        default=None,
        ge=1,
        description="longest text in tokens, for which rotary frequencies that depend on length "
        "(`longrope`, `dynamic`) are fixed; none: `prompt_tokens` and the longest answer",
    )


class ScorerConfig(ModelConfig):
    """A model that only scores."""

    residency: Literal["resident", "swap", "disk", "shared"] = Field(
        default="resident",
        description="place of the weights between calls: on the device, in CPU memory, on disk, or "
        "with all `shared` adapters of one base in a single copy of it",
    )
    quantization: QuantizationName | None = Field(
        default=None,
        description="fewer bits for its linear layers: `int8` or `nf4`, or `nvfp4` as simulated "
        "values; embedding and head stay",
    )

    @model_validator(mode="after")
    def _check_quantization(self) -> Self:
        if self.quantization is not None and self.residency == "shared":
            raise ValueError(
                f"quantization: {self.quantization} rounds merged weights, and residency: shared "
                "merges into exact ones for each call; leave one of them out"
            )
        return self


_KEYS_OF_PEFT = {
    "dora": "the direction and size of a weight (DoRA) are not trained apart; remove it",
    "use_dora": "the direction and size of a weight (DoRA) are not trained apart; remove it",
    "modules_to_save": "next to adapters no module is trained as a whole; remove it, or leave lora out",
    "use_rslora": "write rslora",
    "target_modules": "write targets",
    "r": "write rank",
    "lora_alpha": "write alpha",
}
"""Names of peft's settings that are not keys of `Lora`, and what to write instead."""


class Lora(FrozenConfig):
    """Low-rank adapters (2106.09685) on the linear layers and the experts."""

    rank: int = Field(
        default=CAREFUL.rank,
        ge=1,
        description="by the student: see [settings](settings.md)",
    )
    alpha: float = Field(
        default=CAREFUL.alpha, gt=0, description="by the student: see [settings](settings.md)"
    )
    targets: tuple[str, ...] | None = Field(
        default=None,
        min_length=1,
        description="names of the modules with adapters, such as `q_proj`; none: all",
    )
    rslora: bool = Field(default=False, description="scale by alpha / sqrt(rank) instead (rsLoRA)")

    @model_validator(mode="before")
    @classmethod
    def _refuse_other_adapters(cls, settings: object) -> object:
        for key in settings if isinstance(settings, Mapping) else ():
            if key in _KEYS_OF_PEFT:
                raise ValueError(f"{key}: {_KEYS_OF_PEFT[key]}")
        return settings


class DrafterConfig(FrozenConfig):
    """A small model that drafts tokens for the student's model, which is then frozen.

    Only the drafter is trained. `type` is the name of a module of `practicum.ports.drafters`.
    """

    type: str = "eagle3"
    layers: tuple[int, int, int] | None = Field(
        default=None,
        description="the drafter reads the target's states after these numbers of layers; none: "
        "2, half of them, and all except 3",
    )
    vocabulary: int = Field(
        default=32000,
        ge=1,
        description="tokens that can be drafted: the most frequent tokens of the task's answers",
    )
    depth: int = Field(default=7, ge=1, description="tokens drafted per call of the target")
    decay: float = Field(
        default=0.8, gt=0, le=1, description="factor of the loss from one depth to the next"
    )
    states: Literal["all", "drafted"] = Field(
        default="all",
        description="learn each token of the text at every depth (test-time training), or only at the "
        "depth at which it was drafted or rejected",
    )
    verify: Literal["residual", "shared"] = Field(
        default="residual",
        description="accept a draft with probability min(1, p / q), or if it is the token that the "
        "target samples with the same random numbers",
    )
    width: int = Field(
        default=1,
        ge=1,
        description="drafts per depth; more than 1: a tree of the most likely drafts",
    )
    start: str | None = Field(
        default=None, description="folder of an exported drafter to begin with; none: a new one"
    )
    cache: str | None = Field(
        default=None,
        description="folder of the target's states of whole texts, in the layout of vLLM's "
        "connector; it is read, and what it lacks is added; none: they are computed for each update",
    )

    @model_validator(mode="after")
    def _check_width(self) -> Self:
        if self.width > 1 and self.verify == "residual":
            raise ValueError("width: a tree of drafts is verified by samples; set verify: shared")
        return self


class SpeculationConfig(FrozenConfig):
    """A trained drafter with which a student samples; the tokens are the same as without it."""

    drafter: str = Field(description="folder of a drafter, as `practicum export` writes it")
    type: str = "eagle3"
    depth: int = Field(default=3, ge=1, description="tokens drafted per call of the student")
    width: int = Field(
        default=1,
        ge=1,
        description="drafts per depth; more than 1: a tree of the most likely drafts",
    )
    most_texts: int = Field(
        default=1,
        ge=1,
        description="texts sampled at once with drafts; more texts are sampled without, which is "
        "faster if a call of the student takes longer for more tokens",
    )


class StudentConfig(ModelConfig):
    """The student: a model with trainable weights."""

    lora: Lora | None = Field(
        default=None, description="train adapters instead of the weights themselves"
    )
    trainable_layers: int | None = Field(
        default=None, ge=1, description="train only the last N layers; none: all"
    )
    quantization: Literal["int8", "nf4"] | None = Field(
        default=None,
        description="fewer bits for the frozen linear layers under the adapters (QLoRA, 2305.14314)",
    )
    train_encoder: bool = Field(
        default=False,
        description="also train the part that reads pictures or sounds",
    )
    dropout: bool = Field(
        default=False,
        description="train with the dropout and the routers' noise of the model's config",
    )
    drafter: DrafterConfig | None = Field(
        default=None, description="train only a drafter for this model, see [drafters](drafters.md)"
    )

    @model_validator(mode="after")
    def _check_quantization(self) -> Self:
        if self.quantization is None:
            return self
        excluded = {
            "trainable_layers": self.trainable_layers,
            "train_encoder": self.train_encoder,
            "drafter": self.drafter,
        }
        for key, setting in excluded.items():
            if setting:
                raise ValueError(f"quantization: only with adapters in all layers; remove {key}")
        if self.lora is None:
            raise ValueError(
                "quantization: rounded weights are frozen, so only adapters can be trained; set "
                "lora: {rank: 16, alpha: 32}, or remove quantization"
            )
        return self

    @model_validator(mode="after")
    def _freeze_target(self) -> Self:
        trained = {"lora": self.lora, "trainable_layers": self.trainable_layers}
        if self.train_encoder and any(trained.values()):
            raise ValueError(
                "train_encoder: only with all weights; remove lora and trainable_layers"
            )
        if self.drafter is None:
            return self
        trained["train_encoder"] = self.train_encoder or None
        for key, setting in {**trained, "dropout": self.dropout or None}.items():
            if setting is not None:
                raise ValueError(f"drafter: the model is frozen, so {key} has no effect; remove it")
        return self


class FinishedStage(FrozenConfig):
    """A finished stage of a pipeline, by the folder of its student."""

    # An editor's schema adds `{stage: NAME}` to the choices that it finds here.
    model: Annotated[str, WithJsonSchema({"anyOf": [{"type": "string"}]})] = Field(
        description="`{stage: NAME}`, or the model folder of a finished stage"
    )

    def find_rollouts(self, base_dir: Path) -> Path:
        """Return the rollouts.jsonl of the run, given by its folder or by the folder of its student."""
        folder = base_dir / Path(self.model).expanduser()
        name = "rollouts.jsonl"
        return folder / name if (folder / name).is_file() else folder.parent / name
