"""Load a drafter as the student: the student's model is its frozen target."""

from pathlib import Path
from typing import Any

from practicum.backends.local.drafting import DraftingSampler
from practicum.backends.local.loading import LoadedModel
from practicum.backends.local.sampler import LocalSampler
from practicum.core.plugins import load_plugin
from practicum.costs import TrainableDims
from practicum.errors import ModelError, RecipeError
from practicum.models.config import DrafterConfig, SpeculationConfig
from practicum.models.files import name_when_complete
from practicum.ports import BackendContext
from practicum.ports.drafters import ROOM, DraftModel, DraftVocabulary, choose_layers


def open_drafter(loaded: LoadedModel, config: DrafterConfig, context: BackendContext) -> DraftModel:
    """Make or read the drafter of a target. Raises ModelError or RecipeError if they do not fit."""
    model = loaded.language_model
    if config.start is not None:
        drafter = read_drafter(loaded, config.type, config.start)
        if config.layers is not None and tuple(config.layers) != drafter.layers:
            raise RecipeError(
                f"student.drafter.layers: {list(config.layers)}, but {config.start} reads layers "
                f"{list(drafter.layers)}; remove the key"
            )
        return drafter
    _check_target(loaded)
    module = find_module(config.type)
    choose_layers(config.layers, model.model.config.get_text_config().num_hidden_layers)
    embedding: Any = model.model.get_input_embeddings()
    renderer, rows = loaded.renderer, len(embedding.weight)
    texts = [
        answer
        for prompt in context.task().train_prompts()
        if (answer := prompt.response or prompt.answer or prompt.question)
    ]
    vocabulary = DraftVocabulary.choose(
        map(renderer.encode, texts),
        min(rows, model.vocab_size),
        config.vocabulary,
        renderer.stop_ids,
    )
    vocabulary = DraftVocabulary(vocabulary.ids, rows)
    return module.build(model.model, config, vocabulary, context.seed).to(model.device)


def read_drafter(loaded: LoadedModel, name: str, folder: str) -> DraftModel:
    """Read the drafter of a target, of the type `name`. Raises ModelError if they do not fit."""
    _check_target(loaded)
    target = loaded.language_model
    return find_module(name).read(Path(folder).expanduser(), target.model).to(target.device)


def sample_with_drafter(
    live: LocalSampler, loaded: LoadedModel, settings: SpeculationConfig
) -> DraftingSampler:
    """Return a student's sampler that drafts; ModelError if the drafter does not fit the student."""
    return DraftingSampler(
        live.language_model,
        batch_size=live.batch_size,
        chunk_tokens=live.chunk_tokens,
        learns=live.learns,
        drafter=read_drafter(loaded, settings.type, settings.drafter),
        config=DrafterConfig(depth=settings.depth, width=settings.width, verify="shared"),
        most_texts=settings.most_texts,
    )


def _check_target(loaded: LoadedModel) -> None:
    model = loaded.language_model
    limits = model.window is not None or model.is_recurrent or model.row_limit is not None
    if limits or not model.max_packed_tokens:
        raise ModelError(
            f"{loaded.source}: a drafter's target must keep all tokens of a text, and this one has "
            "sliding windows, recurrent states or unusual attention; use a target with full attention"
        )


def find_module(name: str) -> Any:
    """Return the module of a type of drafters; RecipeError if no module has this name."""
    try:
        return load_plugin(ROOM, name)
    except ValueError as error:
        raise RecipeError(f"student.drafter.type: {error}") from error


def measure_drafter(drafter: DraftModel, depth: int) -> TrainableDims:
    """Return the sizes for FLOP counts: each matrix is used three times per depth."""
    matrices = [weight for weight in drafter.parameters() if weight.ndim > 1]
    return TrainableDims(
        parameters=sum(weight.numel() for weight in drafter.parameters()),
        layers=0,
        body=3 * depth * sum(weight.numel() for weight in matrices),
        adapters=0,
        head=False,
    )


def export_drafter(
    loaded: LoadedModel, drafter: DraftModel, config: DrafterConfig, folder: Path, layout: str
) -> None:
    """Write a drafter's folder in the layout of an engine, and check that it reads back the same."""
    module, target = find_module(config.type), loaded.language_model.model
    with name_when_complete(folder) as staging:
        staging.mkdir()
        module.write(drafter, staging, layout, target, config.depth)
        again = dict(module.read(staging, target).named_parameters())
        for name, weight in drafter.named_parameters():
            if not weight.detach().cpu().equal(again[name].detach()):
                raise ModelError(f"{folder.name}: not exported, since {name} reads back changed")
