"""Export a run's student: a model folder or an adapter, with its model card, here or to the hub."""

from dataclasses import dataclass
from pathlib import Path

from practicum import run_dir as folders
from practicum.errors import RecipeError, ResourceError
from practicum.models.files import name_when_complete
from practicum.models.sources import find_base
from practicum.report.model_card import CardFacts, build_card
from practicum.report.tables import format_bytes
from practicum.runs.hub import create_repository, push_folder
from practicum.runs.opening import open_run, open_student, require_checkpoint, resolve_stage


@dataclass(frozen=True, slots=True)
class Export:
    """An exported folder; `base` names the base model of an adapter."""

    folder: Path
    base: str | None = None
    address: str | None = None
    """The address at the hub, if it was pushed."""
    format: str | None = None
    """The format of a drafter."""
    quantization: str | None = None
    """The format of the base's weights under an adapter."""

    def describe(self) -> list[str]:
        """Return lines with the files, their size, and how to load them."""
        files = sorted(path for path in self.folder.rglob("*") if path.is_file())
        size = sum(path.stat().st_size for path in files)
        names = ", ".join(str(path.relative_to(self.folder)) for path in files)
        place = repr(str(self.folder))
        processors = [path.read_text() for path in files if "processor_config" in path.name]
        kind = f"AutoModelFor{'ImageTextToText' if processors else 'CausalLM'}"
        if any("feature_extractor_type" in text for text in processors):
            kind = "AutoModelForSeq2SeqLM"
        lines = [f"wrote {self.folder}: {len(files)} files, {format_bytes(size)}", names]
        if self.format is not None:
            lines.append(f"load: give {place} to the engine as its draft model (EAGLE3)")
        elif self.base is None:
            lines.append(f"load: {kind}.from_pretrained({place})")
        else:
            lines.append(
                f"load: PeftModel.from_pretrained({kind}.from_pretrained({self.base!r}), {place})"
            )
            if Path(self.base).is_dir():
                lines.append(
                    "the base model is a folder on this machine; users of the adapter also need it"
                )
            if self.quantization is not None:
                lines.append(
                    f"the adapter was trained over the base in {self.quantization}; over its exact "
                    "weights it is another student"
                )
        return lines if self.address is None else [*lines, f"pushed to {self.address}"]


def export_run(
    run_folder: Path,
    folder: Path,
    *,
    adapter: bool = False,
    format: str | None = None,
    push_to_hub: str | None = None,
    public: bool = False,
) -> Export:
    """Write the run's student as a model folder, or as an adapter folder of peft, with a card.

    With a `format`, write its drafter for an engine instead, without a card.
    With `push_to_hub`, also upload it to this name at the hub, `public` or not. Raises RecipeError if the folder exists,
    ModelError if the run trained no adapters, ResourceError if the hub refuses.
    """
    if folder.exists():
        raise RecipeError(f"{folder} exists already; name a folder that does not")
    folders.prepare_folder(folder.absolute().parent)
    # First, so that a refusal of the hub comes before the minutes of an export.
    if push_to_hub is not None:
        create_repository(push_to_hub, private=not public)
    path = resolve_stage(str(run_folder))
    backend, student = open_student(path)
    has_template = student.renderer.tokenizer.chat_template is not None
    facts = read_facts(Path(path), is_adapter=adapter, has_template=has_template)
    # The folder gets its name when it is complete, card included.
    with name_when_complete(folder) as staging:
        if format is not None:
            backend.export_drafter(student, staging, format)
        else:
            backend.export(student, staging, adapter=adapter)
            folders.write_text(staging / "README.md", build_card(facts))
    address = None
    if push_to_hub is not None:
        try:
            address = push_folder(folder, push_to_hub)
        except ResourceError as error:
            raise ResourceError(
                f"{error} (the export is in {folder}; push it later with: hf upload {push_to_hub} "
                f"{folder})"
            ) from None
    base = find_base(student.source) if adapter else None
    return Export(folder, base, address, format, facts.recipe.student.quantization)


def read_facts(run_folder: Path, *, is_adapter: bool, has_template: bool) -> CardFacts:
    """Read the facts of a model card from a run's folder; raises CheckpointError of a damaged file."""
    run_dir, recipe = open_run(run_folder)
    summary = None
    if run_dir.summary_json.is_file():
        summary = folders.read_json(run_dir.summary_json, folders.shapes.SUMMARY)
    return CardFacts(recipe, require_checkpoint(run_dir), summary, is_adapter, has_template)
