"""The documentation matches the code: tables are generated, links resolve, examples run.

`python -m tests.test_docs` rewrites the generated parts, which are between `<!-- generated: NAME -->` and
`<!-- end of generated -->`. A yaml block names its kind in its first line: `# objective`, `# recipe`, `# pipeline`,
`# extends` (a packaged recipe), `# setting` or `# overrides` (of the recipe smoke/toy). A python block runs, unless its
first line is `# file: FOLDER/NAME.py`, in which case it is written to that file for the blocks after it.
"""

import ast
import collections.abc
import functools
import importlib
import json
import pkgutil
import re
import tomllib
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from pydantic import BaseModel
from pydantic_core import PydanticUndefined
from transformers import AutoConfig

from benchmarks import end_to_end, golds, hub, settings, verdict_tables
from benchmarks import page as performance_page
from laboratory import (
    Results,
    list_reproductions,
    load_reproduction,
    name_page,
    read_results,
    render_claims,
    render_study,
)
from laboratory.plot import plot
from laboratory.scaling.__main__ import SUMMARY
from laboratory.scaling.summary import render_law
from practicum import errors, objective, recipe, rollouts
from practicum.backends.local.pictures import FAMILIES
from practicum.cli.app import app
from practicum.core import packaged, plugins
from practicum.core.calls import Call
from practicum.functional import (
    ADVANTAGES,
    CORRECTIONS,
    DIVERGENCES,
    PAIR_LOSSES,
    REWARDS,
    SAMPLE_WEIGHTS,
    WEIGHTS,
)
from practicum.models import config as model_config
from practicum.models.starting_values import SETTINGS
from practicum.monitors import MONITORS, MonitorSettings
from practicum.objective import Objective, Term
from practicum.objective.entries import Choice
from practicum.recipe.schedule import SCHEDULES
from practicum.recipe.settings import SETTINGS_FOLDER
from practicum.rollouts import NOTE_KINDS
from practicum.runs.stages import parse_pipeline
from practicum.studies import doctor
from practicum.teachers import openai_api
from tests import methods_page, section_types
from tests.vision_models import PUBLISHED

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = [*sorted(DOCS.glob("**/*.md")), ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
README = ROOT / "README.md"
GENERATED = re.compile(
    r"(<!-- generated: ([A-Za-z_. ]+) -->\n).*?(<!-- end of generated -->)", re.DOTALL
)
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")

# Meanings of recipe keys with fields that have no description.
MEANINGS = {
    "Recipe.name": "the run folder's name; without it, the recipe file's",
    "Recipe.about": "one line for `practicum ls` and the report",
    "Recipe.paper": "where the method is described",
    "Recipe.seed": "all random streams of the run derive from it",
    "Recipe.student": "the model to train, below",
    "Recipe.teacher": "the model or source that scores tokens: see [teachers](teachers.md)",
    "Recipe.task": "where prompts and rewards come from: see [tasks](tasks.md)",
    "Recipe.rollout": "how completions are sampled, below",
    "Recipe.objective": "the loss: see [objective](objective.md)",
    "Recipe.optimizer": "AdamW, below",
    "Recipe.train": "number and size of the steps, below",
    "Recipe.evaluation": "what is measured before and after, below",
    "RolloutConfig.source": "who generates the tokens to train on: see [rollouts](rollouts.md)",
    "RolloutConfig.max_new_tokens": "maximum tokens of a completion, stop token included",
    "RolloutConfig.temperature": "of sampling only; the loss is always at temperature 1",
    "RolloutConfig.top_p": "nucleus; 1 keeps every token",
    "RolloutConfig.top_k": "the k most likely tokens; 0 keeps every token",
    "OptimizerConfig.learning_rate": "its maximum",
    "OptimizerConfig.schedule": "its shape after the warm-up; `linear` and `cosine` end near 0",
    "OptimizerConfig.warmup_steps": "steps of the linear rise from 0",
    "OptimizerConfig.betas": "betas of AdamW",
    "OptimizerConfig.weight_decay": "weight decay of AdamW",
    "OptimizerConfig.max_grad_norm": "the gradient is scaled down to this norm",
    "TrainConfig.steps": "optimizer steps",
    "TrainConfig.prompts_per_step": "prompts; times `rollout.n` completions",
    "TrainConfig.keep_checkpoints": "number of newest checkpoints to keep",
    "Prices.currency": "currency of the prices",
    "EvaluationConfig.samples": "completions of each held-out prompt",
    "EvaluationConfig.temperature": "0 is greedy",
    "ScratchConfig.architecture": "architecture in transformers",
    "ScratchConfig.hidden_size": "width",
    "ScratchConfig.layers": "depth",
    "ScratchConfig.heads": "attention heads; half as many key-value heads",
    "ScratchConfig.seed": "seed of the weights and of the pretraining batches",
    "ScratchConfig.pretrain": "supervised training first, below; by default `steps: 0`",
    "PretrainConfig.steps": "AdamW steps",
    "PretrainConfig.batch": "answers in a step",
    "PretrainConfig.learning_rate": "falls linearly to 0",
    "ModelConfig.dtype": "of frozen weights and of matrix products; trained weights are float32; `auto`: float32 on a "
    "CPU; on CUDA bfloat16, or the dtype of the checkpoint for a frozen model",
    "ModelConfig.device": "`auto`: CUDA if available, otherwise the CPU",
    "Lora.rank": "rank of each adapter",
    "Lora.alpha": "the adapter's output is scaled by alpha / rank",
    "privileged.demonstrations": "worked examples, each `{prompt: ..., answer: ...}`, shown as earlier turns",
    "self.weights": "how they follow the student's weights, below",
    "RowsConfig.verifier": "how answers are checked, below",
    "Objective.losses": "the loss terms, which are summed; one term needs no list",
    "Objective.aggregate": "how token losses are combined",
    "Term.signal": "what the teacher returns for each token",
    "Term.target": "what the student is compared with",
    "Term.divergence": "distance between student and target: see [divergences](divergences.md)",
    "Term.estimator": "how the divergence becomes a gradient",
    "Term.correction": "importance correction if the sampler is not the learner: see [estimators](estimators.md)",
    "Term.advantage_logprob": "which log-probability of the sampled token the advantage uses",
    "Term.weights": "how much each token counts: see [weights](weights.md)",
    "Term.coefficient": "factor of the term in the loss",
}


def generated(name: str) -> str:
    """Return the text that belongs between the markers of `name`."""
    kind, _, which = name.partition(" ")
    return GENERATORS[kind](which) if which else GENERATORS[kind]()


def _divergences() -> str:
    rows = [
        [
            f"[`{entry.name}`](#{entry.name})",
            ""
            if entry.parameter is None
            else f"`{entry.parameter.name}` = {entry.parameter.default:g}",
            "" if entry.parameter is None else entry.parameter.interval,
            _yes(entry.pointwise),
            _yes(entry.f_divergence),
            _yes(entry.exact_gradient),
            _yes(entry.zero_at_equality),
            _arxiv(entry.paper),
            entry.summary,
        ]
        for entry in DIVERGENCES.values()
    ]
    head = [
        "name",
        "parameter",
        "range",
        "sampled form",
        "f-divergence",
        "exact gradient",
        "0 at S = T",
        "paper",
        "",
    ]
    return _table(head, rows)


def _templates() -> str:
    """Return one row for the templates and switches of an outcome, for conversations with published chat templates."""
    table = json.loads(
        (ROOT / "tests" / "text" / "template_table.json").read_text(encoding="utf-8")
    )
    templates: dict[tuple[str, ...], list[str]] = {}
    for name, found in table["templates"].items():
        by_outcome: dict[str, list[str]] = {}
        for switch, kinds in found["outcome"].items():
            by_outcome.setdefault(json.dumps(kinds), []).append(switch)
        for kinds, switches in by_outcome.items():
            shown = "any" if len(switches) == len(found["outcome"]) else ", ".join(switches)
            cells = [
                cell.replace("thoughts closed", "closed") for cell in json.loads(kinds).values()
            ]
            templates.setdefault((found["licence"], shown, *cells), []).append(f"`{name}`")
    rows = [[", ".join(names), *cells] for cells, names in templates.items()]
    kinds = ["answer", "with thoughts", "earlier thoughts", "earlier call", "form of calls"]
    head = ["templates", "licence", "`thinking`", *kinds, "system turn", "parts", "pictures"]
    return f"Source: {table['source']}.\n\n" + _table(head, rows)


def _weights() -> str:
    rows = [
        [f"`{e.name}`", _arguments(e.defaults), e.summary, _arxiv(e.paper)]
        for e in WEIGHTS.values()
    ]
    return _table(["weight", "parameters", "what counts", "paper"], rows)


def _samples() -> str:
    rows = [
        [f"`{e.name}`", _arguments(e.defaults), e.summary, _arxiv(e.paper)]
        for e in SAMPLE_WEIGHTS.values()
    ]
    return _table(["samples", "parameters", "what counts", "paper"], rows)


def _advantages() -> str:
    rows = [[f"`{e.name}`", e.summary, _arxiv(e.paper)] for e in ADVANTAGES.values()]
    return _table(["advantage", "of each completion within the group of its prompt", "paper"], rows)


def _pair_losses() -> str:
    rows = [
        [
            f"`{loss.name}`",
            f"`{loss.number}`",
            ", ".join(
                f"`{name}` = {default}"
                for name, default in (("beta", loss.beta), ("margin", loss.margin))
                if default is not None
            ),
            loss.summary,
            _arxiv(loss.paper),
        ]
        for loss in PAIR_LOSSES.values()
    ]
    return _table(["loss", "number of an answer", "parameters", "loss of a pair", "paper"], rows)


def _schedules() -> str:
    rows = [
        [
            f"`{name}`",
            ", ".join(f"`{key}`" for key in kind.model_fields if key != "type"),
            _first_paragraph(kind.__doc__),
        ]
        for name, kind in SCHEDULES.items()
    ]
    return _table(["schedule", "parameters", "the number"], rows)


def _methods() -> str:
    head = ["recipe", "what it does", "paper", "formula", "parts", "gain here", "theirs"]
    return _table(head, methods_page.rows())


def _pipelines() -> str:
    head = ["pipeline", "paper", "stages", "formula", "parts", "theirs"]
    return _table(head, methods_page.pipelines())


def _field_families() -> str:
    head = ["family", "signal", "recipes", "reduced", "helps", "not shown", "harms"]
    return _table(head, methods_page.families())


def _field_axes() -> str:
    return _table(["question", "axis", "choices"], methods_page.axes())


def _controls() -> str:
    head = [
        "recipe",
        "its loss with the teacher off",
        "gain, three seeds",
        "gain with the teacher off",
        "what the teacher adds, 95 % over seeds",
    ]
    return f"{methods_page.count_controls()}\n\n{_table(head, methods_page.controls())}"


def _teams() -> str:
    return _table(["pipeline", "differs"], methods_page.teams())


def _corrections() -> str:
    rows = [
        [f"`{e.name}`", _arguments(e.defaults), e.summary, _arxiv(e.paper)]
        for e in CORRECTIONS.values()
    ]
    return _table(["correction", "parameters", "each token's factor", "paper"], rows)


def _rewards() -> str:
    rows = [
        [f"`{e.name}`", _arguments(e.defaults), e.summary, _arxiv(e.paper)]
        for e in REWARDS.values()
    ]
    return _table(["reward", "parameters", "meaning", "paper"], rows)


def _estimators() -> str:
    return _list_parts("estimator", objective.ESTIMATORS)


def _signals() -> str:
    return _list_parts("signal", objective.SIGNALS)


def _targets() -> str:
    return _list_parts("target", objective.TARGETS)


def _clips() -> str:
    return _list_parts("clip", objective.CLIPS)


def _list_parts(axis: str, room: str) -> str:
    names = plugins.list_plugins(room)
    return _list_calls(axis, [plugins.load_plugin(room, name).Config for name in names])


def _list_calls(axis: str, found: Sequence[type[Call]]) -> str:
    rows = [
        [
            f"`{cls.model_fields['type'].default}`",
            _arguments(
                {key: field.default for key, field in cls.model_fields.items() if key != "type"}
            ),
            _first_paragraph(cls.__doc__),
        ]
        for cls in found
    ]
    return _table([axis, "parameters", "meaning"], rows)


def _sources() -> str:
    rows = [
        [f"`{name}`", _parameters(source), _first_paragraph(source.__doc__)]
        for name in plugins.list_plugins(rollouts.SOURCES)
        for source in (plugins.load_plugin(rollouts.SOURCES, name).Config,)
    ]
    return _table(["source", "parameters", "meaning"], rows)


def _parameters(call: type[BaseModel]) -> str:
    """Describe the parameters of a call with their defaults."""
    fields = {key: field for key, field in call.model_fields.items() if key != "type"}
    return ", ".join(
        f"`{key}`" if field.is_required() else f"`{key}` = {field.default}"
        for key, field in fields.items()
    )


MODELS: dict[str, type[BaseModel]] = {
    model.__name__: model
    for model in (
        recipe.Recipe,
        recipe.sections.RolloutConfig,
        recipe.sections.OptimizerConfig,
        recipe.TrainConfig,
        recipe.sections.Budget,
        recipe.Prices,
        recipe.sections.EvaluationConfig,
        model_config.StudentConfig,
        model_config.ScratchConfig,
        model_config.PretrainConfig,
        model_config.Lora,
        Objective,
        Term,
        MonitorSettings,
    )
}


def _keys(which: str) -> str:
    return _key_table(MODELS[which])


def _monitors() -> str:
    """Describe every monitor: its rule with its thresholds, what follows, and how well supported the thresholds are."""
    rows = [
        [
            monitor.id,
            monitor.name,
            (monitor.judge.__doc__ or "").partition("\n")[0],
            monitor.rule_text.format(level=monitor.level or 0.0, change=monitor.change or 0.0),
            str(monitor.persistence),
            monitor.action + ("" if monitor.escalation is None else f", {monitor.escalation[1]}"),
            monitor.source,
            monitor.grade,
        ]
        for monitor in MONITORS.values()
    ]
    head = [
        "id",
        "name",
        "quantity",
        "alarm at",
        "steps in a row",
        "action",
        "source",
        "thresholds",
    ]
    return _table(head, rows)


def _plugins(room: str) -> str:
    """List every plug-in of a package with its summary and its keys; several keys of an earlier one are only named."""
    parts = []
    first: dict[tuple[str, ...], str] = {}
    for name in plugins.list_plugins(room):
        module = plugins.load_plugin(room, name)
        parts.append(f"### {name}\n\n{_first_paragraph(module.__doc__)}\n")
        rows = [tuple(row) for row in _key_rows(module.Config)]
        shared: dict[str, list[str]] = {}
        for row in rows:
            if first.setdefault(row, name) != name:
                shared.setdefault(first[row], []).append(row[0])
        named = {other: keys for other, keys in shared.items() if len(keys) >= 3}
        own = [list(row) for row in rows if first[row] not in named]
        if own:
            parts.append(_table(HEAD, own))
        parts += [
            f"As in [{other}](#{other}): {', '.join(keys)}.\n" for other, keys in named.items()
        ]
        if not rows:
            parts.append("No keys.\n")
    return "\n".join(parts)


HEAD = ["key", "type", "default", "meaning"]


def _key_table(model: type[BaseModel]) -> str:
    return _table(HEAD, _key_rows(model))


def _key_rows(model: type[BaseModel]) -> list[list[str]]:
    rows = []
    for key, field in model.model_fields.items():
        if key == "type":
            continue
        meaning = field.description or _meaning(model, key)
        default = _default(field)
        if meaning.startswith("by the student"):
            default, meaning = "[by the student](settings.md)", ""
        rows.append([f"`{key}`", _type_name(field.annotation), default, meaning])
    if model is recipe.Recipe:
        rows += [[f"`{key}`", "", "none", text] for key, text in recipe.FILE_KEYS.items()]
    return rows


def _meaning(model: type[BaseModel], key: str) -> str:
    """Find the meaning in `MEANINGS`: by the class's name, a base class's, or the plug-in's for a class named Config."""
    names = [
        f"{model.__module__.rpartition('.')[2]}.{key}",
        *(f"{base.__name__}.{key}" for base in model.__mro__),
    ]
    return next((MEANINGS[name] for name in names if name in MEANINGS), "")


def _exit_codes() -> str:
    rows = [["0", "", "the command did what it says"]]
    rows += [
        [str(kind.exit_code), f"`{kind.__name__}`", _first_paragraph(kind.__doc__)]
        for kind in sorted(_error_classes(), key=lambda kind: kind.exit_code)
        if kind is not errors.Interrupted
    ]
    interrupted = _first_paragraph(errors.Interrupted.__doc__)
    return _table(["code", "error", "meaning"], [*rows, ["130, 143", "`Interrupted`", interrupted]])


def _error_classes() -> list[type[errors.PracticumError]]:
    return [
        value
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, errors.PracticumError)
    ]


def _commands() -> str:
    group = typer.main.get_command(app)
    parts = []
    for name, command in group.commands.items():  # type: ignore[attr-defined]
        places = [
            p.metavar or p.name.upper() for p in command.params if p.param_type_name == "argument"
        ]
        rows = [
            [
                f"`{p.metavar or p.name}`" if p.param_type_name == "argument" else f"`{p.opts[0]}`",
                getattr(p, "help", None) or "",
                "" if p.default in (None, False) or callable(p.default) else f"`{p.default}`",
            ]
            for p in command.params
            if p.name != "help"
        ]
        parts.append(
            f"## practicum {name}\n\n{command.help}\n\n```text\npracticum {' '.join([name, *places])}\n```\n"
        )
        parts.append(_table(["argument or option", "meaning", "default"], rows))
        parts.append(f"{command.epilog.replace('Example: ', 'Example: `', 1)}`\n")
    return "\n".join(parts)


def _floors() -> str:
    """Return the package as a tree: its subpackages from the top layer down, each with the first line of its docstring."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"][
        "importlinter"
    ]
    layers = contracts["contracts"][0]["layers"]
    lines = ["src/practicum"]
    for place, layer in enumerate(layers):
        for room in re.findall(r"\w+", layer):
            name = f"{room}/" if _file(room).name == "__init__.py" else f"{room}.py"
            lines.append(f"{len(layers) - place - 1:>3}  {name:<12} {_first_line(room)}")
            lines += [
                f"       {path.parent.name + '/':<10} {_first_line(f'{room}.{path.parent.name}')}"
                for path in sorted(_file(room).parent.glob("*/__init__.py"))
                if path.parent.parent.name == room
            ]
    return "```text\n" + "\n".join(lines) + "\n```\n"


def _file(room: str) -> Path:
    folder = ROOT / "src" / "practicum" / room.replace(".", "/")
    return folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")


def _first_line(room: str) -> str:
    return (ast.get_docstring(ast.parse(_file(room).read_text(encoding="utf-8"))) or "").partition(
        "\n"
    )[0]


def _checks() -> str:
    rows = [
        [
            check.id,
            check.name,
            check.limits,
            check.limits_from,
            check.anchor,
            _first_paragraph(check.run.__doc__)[4:].strip(),
        ]
        for check in doctor.CHECKS
    ]
    return _table(["", "check", "pass / warn / fail", "limits from", "evidence", "question"], rows)


def _verdicts() -> str:
    rows = [
        [rule.word, rule.when, rule.meaning, str(rule.exit_code)]
        for rule in (*doctor.RULES, doctor.GO)
    ]
    return _table(["verdict", "when", "meaning", "exit code"], rows)


def _families() -> str:
    """Show which features work with a tiny model of each architecture, and why a feature fails or was not run."""
    outcome = json.loads(
        (ROOT / "tests" / "backends" / "families.json").read_text(encoding="utf-8")
    )
    columns = {
        "sample": "sampling",
        "score": "scoring",
        "learn": "gradient",
        "resume": "resuming",
        "export": "export",
        "lora": "LoRA",
        "pack": "packing",
    }
    groups: dict[tuple[str, str], list[str]] = {}
    for name, found in outcome.items():
        kind = found["model_type"]
        label = f"`{kind}`" if name == kind else f"{name} (`{kind}`)"
        if "not run" in found:
            groups.setdefault(("not run", found["not run"]), []).append(label)
            continue
        # Steps and exports are only tried with the named families.
        tried = [word for key, word in columns.items() if key in found]
        works = [word for key, word in columns.items() if found.get(key) == "yes"]
        missing = [word for word in tried if word not in works]
        if found["load"] != "yes":
            state = f"only {', '.join(works)}" if works else "nothing works"
        elif missing:
            state = f"everything but {', '.join(missing)}"
        else:
            state = "everything" if len(tried) == len(columns) else ", ".join(works)
        reasons = dict.fromkeys(
            re.sub(r"\b[A-Z]\w+(Model|LM|Decoder)\b", "the model", found[key]).split(" must match")[
                0
            ]
            for key in ("load", *columns)
            if found.get(key, "no") not in ("yes", "no")
        )
        groups.setdefault((state, "; ".join(reasons)), []).append(label)
    rows = [
        [state, ", ".join(labels), why]
        for (state, why), labels in sorted(groups.items(), key=lambda group: group[0][0])
    ]
    return _table(["works", "architectures", "why"], rows)


def _recipes() -> str:
    files = packaged.list_recipe_files()
    rows = []
    for name in recipe.list_recipe_names():
        # The published methods have a page of their own, and hub models a table.
        if name.startswith(("papers/", "teams/", hub.PREFIX)):
            continue
        data = recipe.yaml_files.read_yaml(files[name])
        rows.append([f"`{name}`", data["family"], data["about"]])
    order = list(recipe.FAMILIES)
    rows.sort(key=lambda row: order.index(row[1]))
    return _table(["recipe", "family", "about"], rows)


def _hub_recipes() -> str:
    """Return the table of hub models: the pair, the source of the numbers, and the planned memory."""
    models = hub.read_models()
    record = json.loads(hub.RECORD.read_text(encoding="utf-8"))["plans"]
    rows = []
    for name, memory, fits in hub.yield_rows(record):
        pair = hub.list_models(recipe.load_recipe(name.strip("`")))
        about = recipe.load_recipe(name.strip("`")).about
        tokenizer = models[pair[0]]["tokenizer"] or "*not checked*"
        source = about.partition(", with numbers of ")[2]
        rows.append([name, *(f"`{model}`" for model in pair), source, memory, fits, tokenizer])
    head = ["recipe", "student", "teacher", "settings", *hub.HEAD[1:], "tokenizer"]
    return _table(head, rows)


def _settings() -> str:
    """Return the table of settings: two lines for each row, one for all weights and one for adapters."""
    rows = []
    for row in SETTINGS:
        shared = [
            f"{row.warmup_steps}",
            f"{row.prompts_per_step}",
            f"{row.max_new_tokens} ({row.cpu_max_new_tokens})",
            f"{row.steps}",
        ]
        adapters = f"adapters, rank {row.rank}, alpha {row.alpha:g}"
        rows += [
            [row.title, "all weights", f"{row.learning_rate:g}", *shared, row.source],
            ["", adapters, f"{row.adapter_learning_rate:g}", *shared, row.adapter_source],
        ]
    head = ["student", "training", "learning rate", "warm-up", "prompts per step"]
    return _table([*head, "new tokens (on a CPU)", "steps", "source"], rows)


def _measured_rates() -> str:
    """Describe the effect of each learning rate on the packaged 135M model."""
    record = json.loads(settings.RECORD.read_text(encoding="utf-8"))
    outcomes = [settings.Outcome(**outcome) for outcome in record["runs"]]
    return _table(settings.HEAD, [list(settings.list_cells(outcome)) for outcome in outcomes])


def _end_to_end() -> str:
    """Return the table of this library's and TRL's students after the same runs."""
    record = json.loads(end_to_end.RECORD.read_text(encoding="utf-8"))
    pairs = [end_to_end.Pair(**pair) for pair in record["pairs"]]
    return _table(end_to_end.HEAD, end_to_end.list_rows(pairs))


def _packaged_settings() -> str:
    folder = packaged.locate_packaged_recipes() / SETTINGS_FOLDER
    files = sorted(folder.glob("*.yaml"))
    rows = [[f"`{file.stem}`", recipe.yaml_files.read_yaml(file)["about"]] for file in files]
    return _table(["setting", "models and task"], rows)


def _picture_families() -> str:
    """Show the models that read pictures; `tests/backends/local/test_published_pictures.py` tries each."""
    rows = [
        [
            f"`{family}`",
            f"`{processor}`",
            f"`{AutoConfig.for_model(family).get_text_config().model_type}`",
            f"{PUBLISHED[family].tokens}, {PUBLISHED[family].name}",
        ]
        for family, processor in FAMILIES.items()
    ]
    head = ["type of model", "processor", "its default language model"]
    return _table([*head, "tokens of 640 x 480 pixels, published model"], rows)


def _method_families() -> str:
    rows = [[f"`{name}`", meaning] for name, meaning in recipe.FAMILIES.items()]
    return _table(["family", "recipes in it"], rows)


def _golds() -> str:
    record = json.loads(golds.RECORD.read_text(encoding="utf-8"))
    return _table(*golds.list_cells(record))


def _stored(folder: str = "evidence") -> dict[str, Results]:
    """Return the results of `python -m laboratory` that are stored next to the page."""
    return {
        path.stem: read_results(path) for path in sorted((ROOT / "results" / folder).glob("*.json"))
    }


def _evidence() -> str:
    studies = [load_reproduction(name) for name in list_reproductions()]
    return render_claims(studies, _stored(), _stored("evidence_again")) + "\n"


@functools.cache
def generated_pages() -> dict[Path, str]:
    """Return the pages of which every line is generated: one per study and one per method."""
    studies = {name: load_reproduction(name) for name in _stored()}
    again = _stored("evidence_again")
    return {
        DOCS / "evidence" / name_page(studies[name]): render_study(
            studies[name], found, again.get(name)
        )
        for name, found in _stored().items()
    } | {
        DOCS / "methods" / f"{methods_page.short(name)}.md": methods_page.render_page(name)
        for name in methods_page.PAPERS
    }


def evidence_plots() -> dict[Path, str]:
    """Return the plot of every stored result."""
    folder = DOCS / "img" / "evidence"
    return {
        folder / f"{name}.svg": plot(load_reproduction(name), found)
        for name, found in _stored().items()
    }


def _server_signals() -> str:
    """List the signals that `check` accepts for each dialect of a served teacher."""
    rows = []
    for dialect in ("vllm", "sglang", "echo", "chat"):
        served = {"url": "http://localhost:8000", "dialect": dialect}
        best = openai_api.Config.model_validate(served).capabilities()
        signals = [f"`{name}`" for name in ("sampled", "full") if name in best.signals]
        if "topk" in best.signals:
            signals += [f"`topk(k, support={name})`" for name in sorted(best.supports)[::-1]]
        if dialect == "vllm":
            states = {"folder": "/dev/shm/states", "model": "m"}
            full = openai_api.Config.model_validate({**served, "states": states}).capabilities()
            signals += [f"with `states`: `{name}`" for name in ("full",) if name in full.signals]
        rows.append([f"`{dialect}`", ", ".join(signals) or "none"])
    return _table(["dialect", "signals"], rows)


STEPS = {
    "mixed": "answers of mixed lengths, V = 49,152",
    "fixed": "answers of one length, V = 49,152",
    "toy": "tiny models, V = 4,096",
}
"""The configurations of the step benchmark in the wording of the README."""


def _peer_steps() -> str:
    """Compare speed and memory of whole steps with TRL's trainers, from the newest recorded lines."""
    newest: dict[str, Any] = {}
    for line in map(
        json.loads, (ROOT / "results" / "performance.jsonl").read_text("utf-8").splitlines()
    ):
        if line["benchmark"] == "step" and {"gkd", "distillation"} <= line["peak_mib"].keys():
            newest[line["config"]] = line
    rows = []
    for config, about in STEPS.items():
        line = newest[config]
        speeds, peaks = line["ratios"], {k: v["median"] for k, v in line["peak_mib"].items()}
        rows.append(
            [about]
            + [
                f"{speeds[peer]['median']:.1f} times as fast, {peaks['ours'] / peaks[peer]:.2f} of "
                f"its memory ({peaks['ours']:,.0f} of {peaks[peer]:,.0f} MiB)"
                for peer in ("gkd", "distillation")
            ]
        )
    return _table(["step", "`GKDTrainer`", "`DistillationTrainer`"], rows)


GENERATORS: dict[str, Callable[..., str]] = {
    "divergences": _divergences,
    "golds": _golds,
    "evidence": _evidence,
    "weights": _weights,
    "samples": _samples,
    "advantages": _advantages,
    "pair_losses": _pair_losses,
    "schedules": _schedules,
    "methods": _methods,
    "field_families": _field_families,
    "field_axes": _field_axes,
    "controls": _controls,
    "pipelines": _pipelines,
    "teams": _teams,
    "corrections": _corrections,
    "estimators": _estimators,
    "rewards": _rewards,
    "sources": _sources,
    "keys": _keys,
    "monitors": _monitors,
    "plugins": _plugins,
    "exit_codes": _exit_codes,
    "commands": _commands,
    "floors": _floors,
    "recipes": _recipes,
    "hub_recipes": _hub_recipes,
    "settings": _settings,
    "packaged_settings": _packaged_settings,
    "measured_rates": _measured_rates,
    "end_to_end": _end_to_end,
    "performance": lambda: performance_page.render_results(
        performance_page.read(performance_page.LINES)
    ),
    "method_families": _method_families,
    "families": _families,
    "picture_families": _picture_families,
    "templates": _templates,
    "checks": _checks,
    "discrimination": verdict_tables.render_verdicts,
    "faults": verdict_tables.render_faults,
    "check_rates": verdict_tables.render_checks,
    "alarm_rates": verdict_tables.render_alarms,
    "scaling_law": lambda: render_law(json.loads(SUMMARY.read_text("utf-8"))),
    "verdicts": _verdicts,
    "signals": _signals,
    "targets": _targets,
    "clips": _clips,
    "server_signals": _server_signals,
    "peer_steps": _peer_steps,
}


def _table(head: list[str], rows: list[list[str]]) -> str:
    cells = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
    lines = [head, ["---"] * len(head), *cells]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _arxiv(paper: str) -> str:
    return f"[{paper}](https://arxiv.org/abs/{paper})" if paper else ""


def _arguments(arguments: Mapping[str, Any]) -> str:
    return ", ".join(f"`{key}` = {value}" for key, value in arguments.items())


def _first_paragraph(text: str | None) -> str:
    return " ".join((text or "").strip().split("\n\n")[0].split())


def _type_name(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _type_name(arguments[0])
    if origin is typing.Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(
            dict.fromkeys(_type_name(part) for part in arguments if part is not type(None))
        )
    if origin is tuple:
        return f"list of {_type_name(arguments[0])}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "call" if issubclass(annotation, Call | Choice) else "mapping"
    names = {
        str: "text",
        int: "integer",
        float: "number",
        bool: "true or false",
        Path: "path",
        collections.abc.Callable: "function",
        dict: "mapping",
    }
    return names.get(origin or annotation, getattr(annotation, "__name__", str(annotation)))


def _default(field: Any) -> str:
    if field.default_factory is not None:
        return f"`{{type: {field.default_factory().type}}}`"
    if field.default is PydanticUndefined:
        return "required"
    value = field.default
    if value is None:
        return "none"
    if isinstance(value, Call | Choice):
        return f"`{value.model_dump()}`"
    if isinstance(value, BaseModel) or (
        isinstance(value, tuple) and value and isinstance(value[0], BaseModel)
    ):
        return "its defaults"
    if isinstance(value, tuple):
        return f"`{list(value)}`"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{value}`" if value != "" else "empty"


def rewrite(text: str) -> str:
    """Return a page with its generated parts as they should be."""
    return GENERATED.sub(lambda match: match[1] + generated(match[2]) + match[3], text)


def _blocks(language: str) -> Iterator[tuple[Path, int, str]]:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in FENCE.finditer(text):
            if match[1] == language:
                yield page, text.count("\n", 0, match.start()) + 1, match[2]


def _case(page: Path, line: int) -> str:
    return f"{page.relative_to(ROOT)}:{line}"


YAML_BLOCKS = [pytest.param(text, id=_case(page, line)) for page, line, text in _blocks("yaml")]
PYTHON_PAGES = sorted({page for page, _, _ in _blocks("python")})


@pytest.mark.parametrize("page", [*PAGES, README], ids=lambda page: page.name)
def test_generated_parts_are_what_the_code_says(page):
    text = page.read_text(encoding="utf-8")
    assert rewrite(text) == text, f"{page.name} is out of date; run: python -m tests.test_docs"


@pytest.mark.parametrize(
    ("gains", "alone", "words"),
    [
        (
            [0.69, 0.64, 0.47],
            [0.69, 0.64, 0.47],
            "not resolved: +0.00 [+0.00, +0.00]",
        ),
        (
            [0.5, 0.6, 0.7],
            [0.4, 0.3, 0.7],
            "not resolved: +0.13 [-0.25, +0.51]",
        ),
        ([0.5, 0.6, 0.7], [0.4, 0.5, 0.62], "the teacher adds +0.09 [+0.06, +0.12]"),
        ([0.4, 0.5, 0.62], [0.5, 0.6, 0.7], "the teacher costs 0.09 [0.06, 0.12]"),
        ([0.5], [0.4], "one seed does not show what the teacher adds"),
    ],
)
def test_what_a_teacher_adds_is_said_from_the_numbers(gains, alone, words):
    line, control = ({"gains": [[0.0, gain, 1.0] for gain in found]} for found in (gains, alone))
    assert methods_page.adds(line, control) == words


@pytest.mark.parametrize(
    ("claim", "result"),
    [
        ("Qwen3-8B-Base reaches 69.9 on AIME 2024 in 30 GPU hours", "69.9 on AIME 2024"),
        (
            "41.7 instead of 36.4 on five math benchmarks",
            "41.7 instead of 36.4 on five math benchmarks",
        ),
        ("RULER rises from 77.2 to 86.3 with Qwen2.5-7B", "RULER rises from 77.2 to 86.3"),
        (
            "above GRPO with Qwen3 at 1.7B, 8 to 12 times fewer generated tokens (abstract)",
            "8 to 12 times fewer generated tokens",
        ),
        ("from 60 to 70 on AIME'24 in about 150 steps", "60 to 70 on AIME'24"),
        (
            "a scale of 1.25 and k of 2 and 4 with students of 120M to 13B (table 2.1)",
            "none",
        ),
    ],
)
def test_the_result_of_a_claim_is_quoted_with_its_unit_or_benchmark(claim, result):
    assert methods_page.quote_result(claim) == result


def test_each_study_and_each_method_has_its_page():
    pages = generated_pages()
    assert pages.keys() == {*DOCS.glob("evidence/*.md"), *DOCS.glob("methods/*.md")}
    old = [path.name for path, text in pages.items() if path.read_text("utf-8") != text]
    assert not old, "run: python -m tests.test_docs"


def test_plots_are_those_of_the_stored_results():
    for path, content in evidence_plots().items():
        assert path.read_text(encoding="utf-8") == content, (
            f"{path.name} is out of date; run: python -m tests.test_docs"
        )


def test_every_recipe_key_has_a_meaning():
    configs = [
        plugins.load_plugin(room, name).Config
        for room in ("teachers", "scorers", "tasks", NOTE_KINDS)
        for name in plugins.list_plugins(room)
    ]
    empty = [
        f"{model.__module__}.{model.__name__}.{key}"
        for model in [*MODELS.values(), *configs]
        for key, field in model.model_fields.items()
        if key != "type" and not (field.description or _meaning(model, key))
    ]
    assert not empty, f"give these a description= where they are defined: {empty}"


def test_every_divergence_has_its_section():
    headings = re.findall(
        r"^### (\w+)$", (DOCS / "divergences.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert headings == list(DIVERGENCES)


def test_every_dependency_is_explained():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = {
        *project["dependencies"],
        *(name for extra in project["optional-dependencies"].values() for name in extra),
    }
    names = {re.split(r"[^A-Za-z0-9_-]", name)[0] for name in wanted}
    explained = re.findall(
        r"^\| `([\w-]+)`", (DOCS / "dependencies.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert set(explained) == names


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in _links(page):
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in _anchors(file), f"{page.name} links to {target}"


def test_a_recipe_states_the_measured_effect_of_its_teacher() -> None:
    measured = {
        name: methods_page.name_effect(differences)
        for name, differences in methods_page.measure_effects().items()
    }
    stated = {
        name: effect
        for name in recipe.list_recipe_names()
        if (effect := recipe.read_recipe(recipe.find_recipe(name)).get("teacher_effect"))
    }
    assert stated == measured


def test_the_numbers_of_the_conclusions_are_on_the_pages_of_their_studies() -> None:
    """A number may be rounded further than on the page."""
    page = (ROOT / "docs" / "evidence.md").read_text("utf-8")
    conclusions = page.partition("## Conclusions")[2].partition("## Claims")[0]
    missing, count = [], 0
    for row in (line for line in conclusions.splitlines() if line.startswith("| **")):
        question, result, studies = row.strip("| ").split(" | ")
        numbers = {0.0}
        for name in re.findall(r"\((evidence/[\w-]+\.md)\)", studies):
            text = (ROOT / "docs" / name).read_text("utf-8")
            for number in map(float, re.findall(r"\d+(?:\.\d+)?", text)):
                numbers |= {number, *(round(number, digits) for digits in (1, 2, 3))}
        used = [float(number) for number in re.findall(r"(?<![\d.])\d\.\d+", result)]
        missing += [(question, number) for number in used if number not in numbers]
        count += len(used)
    assert count > 50 and not missing


def test_the_pages_stay_short():
    written, made = 0, 0
    for page in DOCS.glob("**/*.md"):
        text = page.read_text(encoding="utf-8")
        own = "" if page in generated_pages() else GENERATED.sub("", text)
        written += len(own.split())
        made += len(text.split()) - len(own.split())
    assert written <= 62_000, f"{written} hand-written words; shorten a page"
    assert made <= 71_500, f"{made} generated words; shorten a generator"


def test_every_page_is_reached_from_the_index():
    reached, waiting = set(), [DOCS / "index.md"]
    while waiting:
        page = waiting.pop()
        if page in reached or page.suffix != ".md":
            continue
        reached.add(page)
        waiting += [
            (page.parent / target.partition("#")[0]).resolve()
            for target in _links(page)
            if target[0] != "#"
        ]
    assert set(DOCS.glob("**/*.md")) <= reached


def _links(page: Path) -> list[str]:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    return [target for target in LINK.findall(text) if "://" not in target]


def _anchors(page: Path) -> set[str]:
    headings = re.findall(
        r"^#+ (.+)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE
    )
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("text", YAML_BLOCKS)
def test_yaml_blocks_are_valid(text, tmp_path):
    mark, data = text.partition("\n")[0], yaml.safe_load(text)
    if mark == "# objective":
        Objective.model_validate(data)
    elif mark == "# recipe":
        recipe.parse_recipe(data, "block")
    elif mark == "# pipeline":
        parse_pipeline(data, "block")
    elif mark in ("# extends", "# setting"):
        file = tmp_path / "block.yaml"
        file.write_text(yaml.safe_dump(data), encoding="utf-8")
        read = recipe.read_recipe(file)
        if mark == "# extends":
            recipe.parse_recipe(read, "block")
    else:
        assert mark == "# overrides", (
            f"a yaml block starts with # objective, # recipe, # pipeline, # extends, # setting or # overrides, not {mark!r}"
        )
        toy = recipe.read_recipe(recipe.find_recipe("smoke/toy"))
        recipe.parse_recipe(_merged(toy, data), "block")


def _merged(base: dict[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in change.items():
        inside = (
            isinstance(value, Mapping) and isinstance(merged.get(key), dict) and "type" not in value
        )
        merged[key] = _merged(merged[key], value) if inside and key != "objective" else value
    return merged


@pytest.mark.long
@pytest.mark.parametrize("page", PYTHON_PAGES, ids=lambda page: page.name)
def test_python_blocks_run(page, tmp_path, monkeypatch, clean_tables):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    space: dict[str, Any] = {"__name__": "example"}
    for other, line, text in _blocks("python"):
        if other != page:
            continue
        first = re.match(r"# file: (\w+)/(\w+\.py)\n", text)
        if first:
            (tmp_path / first[1]).mkdir(exist_ok=True)
            (tmp_path / first[1] / first[2]).write_text(text, encoding="utf-8")
            importlib.invalidate_caches()
        else:
            exec(compile(text, _case(page, line), "exec"), space)


def test_no_method_that_has_a_recipe_is_said_not_to_fit():
    absent = (DOCS / "field.md").read_text("utf-8").partition("## What does not fit")[2]
    papers = {str(methods_page._recipe(name).paper) for name in methods_page.PAPERS}
    assert absent and not papers & set(re.findall(r"\d{4}\.\d{5}", absent))


def test_every_module_of_the_plug_in_rooms_is_listed():
    for room in ("teachers", "scorers", "tasks", "notes"):
        package = importlib.import_module(f"practicum.{room}")
        text = (DOCS / f"{room}.md").read_text(encoding="utf-8")
        for module in pkgutil.iter_modules(package.__path__):
            assert module.name.startswith("_") or f"### {module.name}\n" in text


if __name__ == "__main__":
    section_types.write_module()
    for file, drawn in evidence_plots().items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(drawn, encoding="utf-8")
    made = generated_pages()
    for old in {*DOCS.glob("evidence/*.md"), *DOCS.glob("methods/*.md")} - made.keys():
        old.unlink()
    for file, text in made.items():
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8")
    for file in [*PAGES, README]:
        before = file.read_text(encoding="utf-8")
        if rewrite(before) != before:
            file.write_text(rewrite(before), encoding="utf-8")
            print(f"rewrote {file.relative_to(ROOT)}")
