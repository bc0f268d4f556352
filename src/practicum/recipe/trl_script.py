"""Read the settings of a TRL training script with `ast`, without executing it.

Known are literals, calls of config classes and trainers, `from_pretrained(...)` and `load_dataset(...)`,
and names that are assigned once to one of these. Everything else is named with its line.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from practicum.errors import RecipeError

CONFIGS = {
    "GKDConfig": "GKDTrainer",
    "GOLDConfig": "GOLDTrainer",
    "DistillationConfig": "DistillationTrainer",
    "GRPOConfig": "GRPOTrainer",
}
"""The config classes that are read, each with its trainer."""
PEFT = "LoraConfig"
PARSERS = ("TrlParser", "HfArgumentParser", "ArgumentParser")
SHOWN = 60


class _Unreadable(Exception):
    """An expression that only running the script can evaluate."""


@dataclass(frozen=True, slots=True)
class Dataset:
    """The arguments of `load_dataset`, and the split that the script takes."""

    positional: tuple[Any, ...]
    keywords: dict[str, Any]
    split: str | None


@dataclass(slots=True)
class TrlScript:
    """The config class of a script, the arguments of its calls, and a line for each unread part."""

    name: str
    config: str
    settings: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    lora: dict[str, Any] | None = None
    notes: list[str] = field(default_factory=list)


def read_trl_script(text: str, name: str) -> TrlScript:
    """Return the settings of a script's first trainer; raises RecipeError if it has no trainer."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise RecipeError(f"{name}: is not Python that can be read ({error})") from error
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    calls.sort(key=lambda call: (call.lineno, call.col_offset))
    reader = _ScriptReader(_collect_assigned(tree), [])
    configs = [call for call in calls if _name_call(call) in CONFIGS]
    trainers = [call for call in calls if _name_call(call) in CONFIGS.values()]
    if not configs and not trainers:
        raise RecipeError(
            f"{name}: calls none of {', '.join(CONFIGS)}; give the script that starts the training"
        )
    if configs:
        kind = _name_call(configs[0])
    else:
        kind = next(key for key, trainer in CONFIGS.items() if trainer == _name_call(trainers[0]))
    script = TrlScript(name, kind, notes=reader.notes)
    for extra in [*configs[1:], *trainers[1:]]:
        script.notes.append(
            f"line {extra.lineno}: a second {_name_call(extra)}; the first one is used"
        )
    if configs:
        script.settings = reader.read_keywords(configs[0], kind)
    for call in calls:
        if _name_call(call) in PARSERS:
            script.notes.append(
                f"line {call.lineno}: {_name_call(call)} reads the command line, which is not here; "
                f"settings that it gives have the defaults of {kind}"
            )
    if trainers:
        script.trainer = reader.read_keywords(trainers[0], _name_call(trainers[0]), ("args",))
    loras = [call for call in calls if _name_call(call) == PEFT]
    if loras:
        script.lora = reader.read_keywords(loras[0], PEFT)
    return script


@dataclass(frozen=True, slots=True)
class _ScriptReader:
    """The names that are assigned in a script, and the notes so far."""

    assigned: dict[str, list[ast.expr]]
    notes: list[str]

    def read_keywords(
        self, call: ast.Call, owner: str, skipped: tuple[str, ...] = ()
    ) -> dict[str, Any]:
        """Return the readable arguments, and note all further arguments by line and name."""
        arguments: dict[str, Any] = {}
        if call.args:
            self._note(call.args[0], f"{owner}: an argument without a name")
        for keyword in call.keywords:
            if keyword.arg in skipped:
                continue
            if keyword.arg is None:
                self._note(keyword.value, f"{owner}: arguments given with **")
                continue
            try:
                arguments[keyword.arg] = self._evaluate(keyword.value)
            except _Unreadable:
                self._note(keyword.value, f"{owner}.{keyword.arg}")
        return arguments

    def _note(self, node: ast.expr, place: str) -> None:
        source = " ".join(ast.unparse(node).split())
        excerpt = source if len(source) <= SHOWN else f"{source[:SHOWN]}..."
        self.notes.append(f"line {node.lineno}: {place} = {excerpt} is no literal; not taken")

    def _evaluate(self, node: ast.expr, depth: int = 0) -> Any:
        """Return the value of an expression; _Unreadable if the script would have to run."""
        if depth > 8:
            raise _Unreadable
        try:
            return ast.literal_eval(node)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            pass
        match node:
            case ast.Name(id=name) if len(self.assigned.get(name, ())) == 1:
                return self._evaluate(self.assigned[name][0], depth + 1)
            case ast.Subscript(value=inner, slice=ast.Constant(value=str() as split)):
                dataset = self._evaluate(inner, depth + 1)
                if isinstance(dataset, Dataset) and dataset.split is None:
                    return Dataset(dataset.positional, dataset.keywords, split)
            case ast.Call() if _name_call(node) == "from_pretrained" and node.args:
                return self._evaluate(node.args[0], depth + 1)
            case ast.Call() if _name_call(node) == "load_dataset":
                keywords = {
                    k.arg: self._evaluate(k.value, depth + 1) for k in node.keywords if k.arg
                }
                split = keywords.pop("split", None)
                positional = tuple(self._evaluate(entry, depth + 1) for entry in node.args)
                return Dataset(positional, keywords, split)
        raise _Unreadable


def _collect_assigned(tree: ast.AST) -> dict[str, list[ast.expr]]:
    """Return the expressions that each name is assigned; a name that changes in another way counts
    as assigned twice."""
    assigned: dict[str, list[ast.expr]] = {}

    def add(target: ast.expr | str, expression: ast.expr) -> None:
        name = (
            target if isinstance(target, str) else target.id if isinstance(target, ast.Name) else ""
        )
        assigned.setdefault(name, []).append(expression)

    nothing = ast.Name("?")
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=targets, value=expression):
                for target in targets:
                    add(target, expression)
                    for inner in _list_names(target):
                        add(inner, nothing)
                        add(inner, nothing)
            case ast.AnnAssign(target=target, value=ast.expr() as expression):
                add(target, expression)
            case (
                ast.AugAssign(target=target) | ast.For(target=target) | ast.NamedExpr(target=target)
            ):
                add(target, nothing)
                add(target, nothing)
            case ast.arg(arg=name) | ast.FunctionDef(name=name):
                add(name, nothing)
                add(name, nothing)
    return assigned


def _list_names(target: ast.expr) -> Iterator[str]:
    """Yield the names of an assignment of several."""
    if isinstance(target, ast.Tuple | ast.List):
        for part in target.elts:
            if isinstance(part, ast.Name):
                yield part.id


def _name_call(call: ast.Call) -> str:
    match call.func:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""
