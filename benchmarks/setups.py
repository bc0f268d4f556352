"""Make setups of small models for a measurement of the doctor: healthy ones, and each broken as a user might break it.

A setup is a recipe with its models and rows in a folder. Its twin is the same recipe without the fault: the twin's task, template
and length judge both. `FAULTS` names each fault with its doses; `build_setup(place, number, fault)` writes the files of one setup.
"""

import json
import random
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from practicum.backends.local.scratch import build_scratch_model
from practicum.models.config import PretrainConfig, ScratchConfig
from practicum.models.sources import locate_gguf
from practicum.types import Message, Prompt

LETTERS = "abcdef"
ALPHABET = LETTERS + "ABCDEF~.0123456789"
"""The characters of all models; some only occur where a fault writes them."""

MODEL = "smollm2-135m-instruct"
DATA = Path(__file__).resolve().parents[1] / "recipes" / "products-data"

TRAINING_ROWS, HELDOUT_ROWS, LESSONS = 320, 64, 160
"""Rows of a run, held-out rows, and the rows of each of two draws on which models are pretrained."""
PAIRS = 20

TEMPLATE = (
    "{% for message in messages %}{{ '<' + message['role'] + '>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ '</s>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}"
    "{% if enable_thinking is defined and enable_thinking %}~{% endif %}{% endif %}"
)
"""The template of all models; its thinking switch writes a character that no model was trained on."""

TWICE = TEMPLATE.replace("+ message['content'] }}", "+ message['content'] + message['content'] }}")
WITHOUT_MARKS = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ '</s>' }}{% endif %}{% endfor %}"
)
OTHER_ROLES = TEMPLATE.replace("'<' + message['role'] + '>'", "'<system>'")
TEMPLATES = {"twice": TWICE, "no marks": WITHOUT_MARKS, "another role": OTHER_ROLES}

REAL_TEMPLATES = {
    "names and colons": "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}{{ 'assistant: ' }}",
    "no marks": "{% for m in messages %}{{ m.content }}{% endfor %}",
    "no last turn": "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}",
}
"""Wrong templates for the 135M model."""

REAL = 1000
"""Setups from this number on are of the packaged 135M model."""

RULES: dict[str, Callable[[str], str]] = {
    "reverse": lambda text: text[::-1],
    "next": lambda text: "".join(LETTERS[(LETTERS.index(c) + 1) % len(LETTERS)] for c in text),
    "double": lambda text: "".join(c + c for c in text),
    "sort": lambda text: "".join(sorted(text)),
}
"""The tasks: a rule from a word to its answer."""

STUDENT_STEPS = {"reverse": 150, "next": 110, "double": 150, "sort": 110}
"""Supervised steps after which a student is right in some of its answers."""

TEACHER_STEPS = (700, 1000)
"""Supervised steps after which a teacher is right in nearly all of its answers."""

STEPS = 80
"""Steps of a run."""


@dataclass(frozen=True, slots=True)
class Setup:
    """A recipe, the recipe that judges its students, and its fault."""

    name: str
    fault: str
    dose: str
    recipe: dict[str, Any]
    judge: dict[str, Any]
    measures: bool = False
    """True if the fault is in the measurement, so that the student's gain says nothing about it."""


@dataclass(slots=True)
class Draft:
    """A setup while it is made: its folder, its parts, and a random generator."""

    folder: Path
    recipe: dict[str, Any]
    rows: dict[str, list[dict[str, Any]]]
    draw: random.Random
    models: Path
    pair: int
    dose: str = ""
    measures: bool = False

    @property
    def is_real(self) -> bool:
        """True for the 135M model."""
        return self.pair < 0

    def get_section(self, side: str) -> dict[str, Any]:
        """Return the section that names the model of a side, inside any wrapping teacher."""
        section = self.recipe[side]
        while "teacher" in section:
            section = section["teacher"]
        return section

    def copy_model(self, side: str) -> Path:
        """Copy the model of a side into the folder and use it in the recipe."""
        section = self.get_section(side)
        folder = self.folder / side
        shutil.copytree(locate(section["model"]), folder)
        section["model"] = str(folder)
        return folder

    def choose(self, *doses: Any) -> Any:
        """Choose one dose, and record it."""
        dose = self.draw.choice(doses)
        self.dose = str(dose)
        return dose


def write_words(
    rule: str, shortest: int, longest: int, seed: int
) -> dict[str, list[dict[str, Any]]]:
    """Draw different words, and write rows to train on and held-out rows."""
    draw = random.Random(seed)
    words: dict[str, None] = {}
    while len(words) < TRAINING_ROWS + HELDOUT_ROWS:
        words["".join(draw.choices(LETTERS, k=draw.randint(shortest, longest)))] = None
    rows = [{"prompt": word, "answer": RULES[rule](word)} for word in words]
    return {"train": rows[HELDOUT_ROWS:], "heldout": rows[:HELDOUT_ROWS]}


def build_pair(models: Path, number: int) -> dict[str, Any]:
    """Make the student and the teacher of a pair unless they exist; return the facts of the pair."""
    draw = random.Random(f"pair {number}")
    rule = list(RULES)[number % len(RULES)]
    shortest, longest = draw.choice([(3, 4), (3, 5), (4, 4)])
    facts = {"rule": rule, "shortest": shortest, "longest": longest, "seed": number}
    sizes = {"student": draw.choice([32, 48]), "teacher": draw.choice([64, 96])}
    fewest = STUDENT_STEPS[rule] * (4 if sizes["student"] == 32 else 3) // (3 if longest > 4 else 4)
    steps = {
        "student": draw.randint(fewest, fewest * 3 // 2),
        "teacher": draw.choice(TEACHER_STEPS),
    }
    lessons = [
        Prompt(row["prompt"], (Message("user", row["prompt"]),), answer=row["answer"])
        for row in write_words(rule, shortest, longest, number)["train"][:LESSONS]
    ]
    extra = write_words(rule, shortest, longest, 1000 + number)
    lessons += [
        Prompt(f"extra {row['prompt']}", (Message("user", row["prompt"]),), answer=row["answer"])
        for row in extra["train"][:LESSONS]
    ]
    for index, side in enumerate(sizes):
        folder = models / f"pair-{number}" / side
        if not folder.is_dir():
            config = ScratchConfig(
                hidden_size=sizes[side],
                layers=2,
                heads=4,
                seed=2 * number + index,
                pretrain=PretrainConfig(steps=steps[side]),
            )
            unfinished = folder.with_name(f"{side}.unfinished")
            shutil.rmtree(unfinished, ignore_errors=True)
            build_scratch_model(unfinished, config, ALPHABET, lessons)
            (unfinished / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
            unfinished.rename(folder)
    return facts


def draw_recipe(
    models: Path, number: int
) -> tuple[dict[str, Any], dict[str, list[dict[str, Any]]]]:
    """Draw a healthy recipe and its rows: the pair, the loss, the rate and the answers per prompt."""
    pair = number % PAIRS
    facts = build_pair(models, pair)
    draw = random.Random(f"recipe {number}")
    folder = models / f"pair-{pair}"
    longest = facts["longest"] * (2 if facts["rule"] == "double" else 1) + 1
    loss = draw.choice(
        [
            {"signal": "full", "divergence": "reverse_kl"},
            {"signal": "full", "divergence": "reverse_kl"},
            {"signal": "full", "divergence": "forward_kl"},
            {"signal": "full", "divergence": "jsd(0.5)"},
            {"signal": "topk(6)", "divergence": "reverse_kl"},
        ]
    )
    answers = draw.choice([1, 2, 4])
    recipe = {
        "seed": number,
        "student": {"model": str(folder / "student")},
        "teacher": {"type": "model", "model": str(folder / "teacher")},
        "task": {"type": "jsonl", "verifier": "exact"},
        "rollout": {"n": answers, "max_new_tokens": longest + draw.choice([1, 3])},
        "objective": loss,
        "optimizer": {"learning_rate": draw.choice([0.0015, 0.002, 0.003]), "warmup_steps": 5},
        "train": {"steps": STEPS, "prompts_per_step": 48 // answers, "threads": 1},
        "evaluation": {"prompts": HELDOUT_ROWS, "temperature": 1.0, "every": 20},
    }
    if draw.random() < 0.1:
        recipe["student"]["lora"] = {"rank": 16, "alpha": 32}
        recipe["optimizer"]["learning_rate"] *= 1.5
    return recipe, write_words(facts["rule"], facts["shortest"], facts["longest"], facts["seed"])


def locate(model: str) -> Path:
    """Return the folder of a model, packaged or not."""
    return locate_gguf(model) if model == MODEL else Path(model)


def draw_real_recipe(number: int) -> tuple[dict[str, Any], dict[str, list[dict[str, Any]]]]:
    """Draw a healthy recipe like products: another loss, rate, depth or number of worked examples."""
    draw = random.Random(f"real recipe {number}")
    rows = {
        part: [
            json.loads(line) for line in (DATA / f"{part}.jsonl").read_text("utf-8").splitlines()
        ]
        for part in ("train", "heldout")
    }
    operands = draw.sample([(13, 2), (4, 15), (14, 3), (5, 20), (3, 17), (6, 16)], k=4)
    worked = [
        {"prompt": f"What is {a} times {b}?", "answer": f"{a} * {b} = {a * b}"} for a, b in operands
    ]
    answers = draw.choice([1, 2])
    recipe = {
        "seed": number,
        "student": {"model": MODEL, "system": "", "trainable_layers": draw.choice([8, 12])},
        "teacher": {
            "type": "privileged",
            "teacher": {"type": "model", "model": MODEL, "system": ""},
            "demonstrations": worked,
        },
        "task": {"type": "jsonl", "verifier": "number"},
        "rollout": {"n": answers, "max_new_tokens": draw.choice([10, 12])},
        "objective": {
            "signal": "full",
            "divergence": draw.choice(["reverse_kl", "forward_kl", "jsd(0.5)"]),
        },
        "optimizer": {
            "learning_rate": draw.choice([0.00007, 0.0001, 0.00015]),
            "schedule": "linear",
        },
        "train": {"steps": 24, "prompts_per_step": 16 // answers, "threads": 1},
        "evaluation": {"prompts": 36, "max_new_tokens": 24, "teacher": False, "every": 4},
    }
    return recipe, rows


def name_setup(number: int, fault: str) -> str:
    """Return the name of a setup, which is also its folder's."""
    return f"{number:03}-{fault.replace(' ', '-') or 'healthy'}"


def build_setup(place: Path, number: int, fault: str = "", keep_runs: bool = False) -> Setup:
    """Write the files of a setup into its folder, and return it; `keep_runs` keeps existing files."""
    models = place / "models"
    is_real = number >= REAL
    recipe, rows = draw_real_recipe(number) if is_real else draw_recipe(models, number)
    name = name_setup(number, fault)
    folder = place / name
    if not keep_runs:
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    judge = json.loads(json.dumps(recipe)) | {"name": "judge"}
    judge["task"] |= _write_rows(folder / "clean", rows)
    draft = Draft(
        folder,
        recipe,
        json.loads(json.dumps(rows)),
        random.Random(f"{number} {fault}"),
        models,
        -1 if is_real else number % PAIRS,
    )
    recipe["name"] = name
    if fault:
        FAULTS[fault](draft)
    recipe["task"] = _write_rows(folder, draft.rows) | recipe["task"]
    return Setup(name, fault, draft.dose, recipe, judge, draft.measures)


def _write_rows(folder: Path, rows: Mapping[str, list[dict[str, Any]]]) -> dict[str, str]:
    folder.mkdir(exist_ok=True)
    for part, content in rows.items():
        text = "".join(json.dumps(row) + "\n" for row in content)
        (folder / f"{part}.jsonl").write_text(text, encoding="utf-8")
    return {"path": str(folder / "train.jsonl"), "heldout": str(folder / "heldout.jsonl")}


def _break_teacher_template(draft: Draft) -> None:
    templates = REAL_TEMPLATES if draft.is_real else TEMPLATES
    draft.get_section("teacher")["template"] = templates[draft.choose(*templates)]


def _break_student_template(draft: Draft) -> None:
    templates = REAL_TEMPLATES if draft.is_real else TEMPLATES
    draft.get_section("student")["template"] = templates[draft.choose(*templates)]


def _permute_tokens(draft: Draft) -> None:
    """Permute the teacher's letters, in its tokenizer or in its weights."""
    folder = draft.copy_model("teacher")
    what = draft.choose("other ids", "other weights")
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text("utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    letters = "0123456789" if draft.is_real else LETTERS
    ids = [vocabulary[letter] for letter in letters]
    rotated = ids[1:] + ids[:1]
    if what == "other ids":
        vocabulary |= dict(zip(letters, rotated, strict=True))
        path.write_text(json.dumps(tokenizer), encoding="utf-8")
        return
    model = AutoModelForCausalLM.from_pretrained(folder)
    table = model.state_dict()["model.embed_tokens.weight"]
    with torch.no_grad():
        table[ids] = table[rotated].clone()
    model.save_pretrained(folder)


def _kill_verifier(draft: Draft) -> None:
    draft.measures = True
    whats = ["other rows' golds", "the prompt as gold", "empty words", "explained golds"]
    # The verifier of numbers finds the right one in an explained gold.
    what = draft.choose(*whats[: 3 if draft.is_real else 4])
    rows = [*draft.rows["train"], *draft.rows["heldout"]]
    golds = [row["answer"] for row in rows]
    if what == "explained golds":
        golds = [f"The answer is {gold}" for gold in golds]
    elif what == "other rows' golds":
        golds = golds[7:] + golds[:7]
    elif what == "the prompt as gold":
        golds = [f"{row['prompt']}." for row in rows]
    else:
        golds = [f"{gold[0]}.{gold[1:]}" for gold in golds]
    for row, gold in zip(rows, golds, strict=True):
        row["answer"] = gold


def _accept_everything(draft: Draft) -> None:
    """Make every gold a text that all answers contain or nearly all."""
    draft.measures = True
    draft.recipe["task"]["verifier"] = "contains"
    what = draft.choose("first letter", "last letter")
    for row in (*draft.rows["train"], *draft.rows["heldout"]):
        row["answer"] = row["answer"][0 if what == "first letter" else -1]


def _shorten_answers(draft: Draft) -> None:
    longest = 6 if draft.is_real else max(len(row["answer"]) for row in draft.rows["train"])
    draft.recipe["rollout"]["max_new_tokens"] = {
        "one": 1,
        "half": longest // 2,
        "no room to stop": longest,
    }[draft.choose("one", "half", "no room to stop")]


def _raise_rate(draft: Draft) -> None:
    draft.recipe["optimizer"]["learning_rate"] *= draft.choose(30, 100, 1000)


def _lower_rate(draft: Draft) -> None:
    draft.recipe["optimizer"]["learning_rate"] *= draft.choose(1e-4, 1e-3)


def _raise_temperature(draft: Draft) -> None:
    draft.recipe["rollout"]["temperature"] = draft.choose(3.0, 6.0)


def _lower_temperature(draft: Draft) -> None:
    draft.recipe["rollout"]["temperature"] = draft.choose(0.05, 0.01)


def _bend_target(draft: Draft) -> None:
    draft.recipe["objective"]["target"] = f"teacher(temperature={draft.choose(0.05, 5, 20)})"


def _add_heldout_rows(draft: Draft) -> None:
    draft.measures = True
    what = draft.choose("with a full stop", "in capitals", "the same file")
    if what == "the same file":
        draft.recipe["task"] |= {"heldout": str(draft.folder / "train.jsonl")}
        return
    change = (lambda text: f"{text}.") if what == "with a full stop" else str.upper
    for row in draft.rows["heldout"]:
        draft.rows["train"].append({**row, "prompt": change(row["prompt"])})


def _attach_adapter(draft: Draft) -> None:
    """Put an adapter of other weights on a side: noise, at a scale that matters."""
    side = draft.draw.choice(["teacher", "student"])
    scale = draft.choose(3.0, 10.0)
    draft.dose = f"{side}, {scale}"
    base = AutoModelForCausalLM.from_pretrained(locate(draft.get_section(side)["model"]))
    adapted = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"))
    generator = torch.Generator().manual_seed(draft.pair + 1)
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_B" in name:
                weight.copy_(
                    scale * torch.randn(weight.shape, generator=generator) / weight.shape[0] ** 0.5
                )
    folder = draft.copy_model(side)
    adapted.merge_and_unload().save_pretrained(folder)  # pyright: ignore[reportCallIssue]


def _take_other_teacher(draft: Draft) -> None:
    """Name another checkpoint as the teacher: the student itself, a teacher of another task, or one before training."""
    what = draft.choose(
        "the student", *(() if draft.is_real else ("of another task",)), "untrained"
    )
    if what == "the student" and draft.is_real:
        draft.recipe["teacher"]["demonstrations"] = []
    elif what == "the student":
        draft.get_section("teacher")["model"] = draft.get_section("student")["model"]
    elif what == "of another task":
        pair = (draft.pair + 1) % PAIRS
        build_pair(draft.models, pair)
        draft.get_section("teacher")["model"] = str(draft.models / f"pair-{pair}" / "teacher")
    else:
        model = AutoModelForCausalLM.from_pretrained(draft.copy_model("teacher"))
        torch.manual_seed(draft.pair + 1)
        for weight in model.parameters():
            torch.nn.init.normal_(weight, std=0.02)
        model.save_pretrained(draft.get_section("teacher")["model"])


def _round_weights(draft: Draft) -> None:
    """Store a side's weights in a type with too few bits, as a bad conversion does."""
    side = draft.draw.choice(["teacher", "student"])
    what = draft.choose("three bits", "float16 overflow", "float8 without scales")
    draft.dose = f"{side}, {what}"
    model = AutoModelForCausalLM.from_pretrained(draft.copy_model(side))
    with torch.no_grad():
        for weight in model.parameters():
            if what == "three bits":
                step = weight.abs().max() / 3
                weight.copy_((weight / step).round() * step)
            elif what == "float16 overflow":
                weight.copy_((weight * 1e7).half().float())
            else:
                weight.copy_((weight / 16).to(torch.float8_e4m3fn).float() * 16)
    model.save_pretrained(draft.get_section(side)["model"])


def _cut_prompts(draft: Draft) -> None:
    """Cut the prompts: in the rows, or by the limit of the recipe."""
    what = draft.choose("the last letter", "the first letter", "the limit leaves rows out")
    if what == "the limit leaves rows out":
        draft.recipe["prompt_tokens"] = 5
        return
    draft.measures = True
    keep = slice(None, -1) if what == "the last letter" else slice(1, None)
    for row in (*draft.rows["train"], *draft.rows["heldout"]):
        row["prompt"] = row["prompt"][keep]


def _switch_thinking(draft: Draft) -> None:
    """Turn the switch of the template on, or for a template without one, add a system turn that forbids the answer."""
    if draft.is_real:
        draft.dose = "a system turn"
        draft.get_section("teacher")["system"] = "Never write a number. Reply with a short poem."
        return
    side = draft.choose("teacher", "student")
    draft.get_section(side)["thinking"] = True


def _flatten_teacher(draft: Draft) -> None:
    """Give the teacher the same scores everywhere: weights of zero, or a head without the text."""
    what = draft.choose("zero weights", "zero layers")
    model = AutoModelForCausalLM.from_pretrained(draft.copy_model("teacher"))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if what == "zero weights" or "layers" in name:
                weight.zero_()
    model.save_pretrained(draft.get_section("teacher")["model"])


def _kill_reward(draft: Draft) -> None:
    """Learn from a reward that never differs: no right answer, or one answer per prompt in a group."""
    what = draft.choose("never right", "alone in its group")
    score = {"signal": "score(group_normalized)", "estimator": "score_function"}
    draft.recipe["teacher"] = {"type": "none"}
    draft.recipe["objective"] = score
    if what == "never right":
        draft.recipe["rollout"]["n"] = 4
        draft.recipe["train"]["prompts_per_step"] = 12
        _kill_verifier(draft)
        draft.measures = False
        draft.dose = f"never right, {draft.dose}"
    else:
        draft.recipe["rollout"]["n"] = 1


FAULTS: dict[str, Callable[[Draft], None]] = {
    "teacher template": _break_teacher_template,
    "student template": _break_student_template,
    "vocabulary": _permute_tokens,
    "verifier rejects": _kill_verifier,
    "verifier accepts": _accept_everything,
    "length": _shorten_answers,
    "rate too high": _raise_rate,
    "rate too low": _lower_rate,
    "sampling too hot": _raise_temperature,
    "sampling too cold": _lower_temperature,
    "target": _bend_target,
    "leak": _add_heldout_rows,
    "adapter": _attach_adapter,
    "checkpoint": _take_other_teacher,
    "dtype": _round_weights,
    "cut prompts": _cut_prompts,
    "thinking": _switch_thinking,
    "constant teacher": _flatten_teacher,
    "dead reward": _kill_reward,
}
"""Each way to break a setup, by its name."""
