"""Plan the packaged recipes of hub models without their weights: the memory of one process on one GPU.

    python -m benchmarks hub [--only gemma-3-270m ...] [--record]

The sizes of the models are in recipes/hub/models.json. Nothing is downloaded: the tokenizer is a made one with as many
tokens, and prompts have 256 tokens. Weights and products are in bfloat16, and the rest as on a CPU; `practicum plan --gpu`
counts a card's memory. `change` are the savings of `practicum plan` with which a recipe fits into 24 GiB.
"""

import argparse
import contextlib
import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from benchmarks.measuring import describe_commit, format_table
from practicum.core.notes import hide_notes
from practicum.core.packaged import locate_packaged_recipes
from practicum.costs import format_bytes
from practicum.errors import PracticumError
from practicum.recipe import Recipe, list_recipe_names, load_recipe
from practicum.runs.overrides import apply_overrides
from practicum.runs.plan import CostPlan, plan
from practicum.runs.plan.planning import SAVINGS

RECORD = Path(__file__).resolve().parents[1] / "results" / "hub.json"
MODELS = locate_packaged_recipes() / "hub" / "models.json"
PREFIX = "hub/"
SMALL = 24 * 2**30
"""The memory of a small GPU."""

PROMPT_TOKENS, TRAIN_ROWS, HELDOUT_ROWS = 256, 512, 64

_CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def main() -> None:
    """Plan each recipe and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="recipes by the end of their names"
    )
    parser.add_argument("--record", action="store_true", help="write results/hub.json")
    parser.add_argument("--quick", action="store_true", help="only the smallest recipe")
    options = parser.parse_args()
    only = ["gemma-3-270m"] if options.quick else options.only
    names = [
        name for name in list_hub_recipes() if only is None or name.removeprefix(PREFIX) in only
    ]
    record: dict[str, Any] = {"plans": {}}
    if RECORD.is_file():
        record = json.loads(RECORD.read_text(encoding="utf-8"))
    for name in names:
        record["plans"][name] = measure(name)
        print(name, record["plans"][name], flush=True)
    print(format_table(HEAD, list(yield_rows({name: record["plans"][name] for name in names}))))
    if options.record:
        record["commit"] = describe_commit()
        RECORD.write_text(json.dumps(record, indent=2, sort_keys=True) + "\n", encoding="utf-8")


HEAD = ["recipe", "memory in bfloat16", "fits into 24 GiB"]


def yield_rows(plans: Mapping[str, Mapping[str, Any]]) -> Iterator[list[str]]:
    """Yield the cells of each plan."""
    for name, figures in plans.items():
        change = figures["change"]
        verdict = "yes" if figures["peak"] <= SMALL else "no"
        if change is not None:
            verdict = "with " + " ".join(f"`{text}`" for text in change)
        yield [f"`{name}`", format_bytes(figures["peak"]), verdict]


def list_hub_recipes() -> list[str]:
    """Return the names of the packaged recipes with models of the hub."""
    return [name for name in list_recipe_names() if name.startswith(PREFIX)]


def read_models() -> dict[str, dict[str, Any]]:
    """Return the models by hub name: `config`, `parameters` as published, `tokens` and `source`."""
    return json.loads(MODELS.read_text(encoding="utf-8"))


def measure(name: str) -> dict[str, Any]:
    """Return the planned peak of a recipe in bytes, its phase, and the change for a small GPU."""
    with open_recipe(name) as recipe:
        full = plan_on_gpu(recipe)
        return {
            "peak": full.memory.peak,
            "phase": full.memory.largest,
            "change": None if full.memory.peak <= SMALL else find_change(recipe),
        }


@contextlib.contextmanager
def open_recipe(name: str) -> Iterator[Recipe]:
    """Yield a recipe in a temporary working directory where its hub names are folders without weights."""
    with tempfile.TemporaryDirectory() as place, contextlib.chdir(place):
        folder = Path(place)
        for file, count in {"train": TRAIN_ROWS, "heldout": HELDOUT_ROWS}.items():
            rows = [
                {"prompt": f"{file} {number} ".ljust(PROMPT_TOKENS, "x"), "answer": f"{number}"}
                for number in range(count)
            ]
            text = "\n".join(map(json.dumps, rows))
            (folder / f"{file}.jsonl").write_text(text, encoding="utf-8")
        task = f"{{type: jsonl, path: {place}/train.jsonl, heldout: {place}/heldout.jsonl}}"
        recipe = load_recipe(name, [f"task={task}"])
        for model in list_models(recipe):
            write_model(folder / model, read_models()[model])
        yield recipe


def list_models(recipe: Recipe) -> tuple[str, str]:
    """Return the hub names of a recipe's student and teacher."""
    student, teacher = recipe.student.model, recipe.model_dump()["teacher"]["model"]
    assert isinstance(student, str)
    return student, teacher


def write_model(folder: Path, model: Mapping[str, Any]) -> None:
    """Write a model's `config.json`, and a tokenizer of bytes with as many tokens as its own."""
    folder.mkdir(parents=True)
    config, tokens = model["config"], model["tokens"]
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    rows = config.get("text_config", config)["vocab_size"]
    controls = ["<|im_start|>", "<|im_end|>"]
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *controls]
    pieces += [f"<unused {number}>" for number in range(len(pieces), min(tokens, rows))]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=_CHATML,
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
    )
    if tokens > rows:  # as text-only Gemma 3
        fast.add_special_tokens({"extra_special_tokens": ["<image_soft_token>"]})
    fast.save_pretrained(folder)
    if tokens > rows:
        settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        settings["image_token"] = "<image_soft_token>"
        (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def plan_on_gpu(recipe: Recipe) -> CostPlan:
    """Plan a recipe as one process on a GPU, without Python's own memory."""
    with hide_notes():
        return plan(recipe, limit=SMALL, process=0, for_cluster=True)


def find_change(recipe: Recipe) -> list[str] | None:
    """Return one of the plan's savings with which a recipe fits, else the needed ones of all; None if all are not enough."""
    savings = [text for text in SAVINGS if not text.endswith(("FITS", "HALF"))]
    single = next(([text] for text in savings if fits(recipe, [text])), None)
    if single is not None:
        return single
    # Of two values for one key the later, stronger one counts.
    change = list({text.partition("=")[0]: text for text in savings}.values())
    if not fits(recipe, change):
        return None
    for text in list(change):
        fewer = [saving for saving in change if saving != text]
        if fits(recipe, fewer):
            change = fewer
    return change


def fits(recipe: Recipe, change: list[str]) -> bool:
    """Return whether a changed recipe fits into the memory of a small GPU."""
    try:
        return plan_on_gpu(apply_overrides(recipe, change)).memory.peak <= SMALL
    except PracticumError:
        return False  # a change that this recipe cannot have
