"""Chat templates as programs of strangers: rendered as transformers renders them, within bounds of time and size.

A template runs in the sandbox of transformers, in which it reaches no file and no module. What the sandbox leaves open are nested
loops, and texts that grow: `'a' * 10**9`, `x ~ x` again and again, `'%1000000000d' % 1`. So each turn of a loop, each call, filter
and operator, and each text that is written is counted here. What could multiply is measured before it is done. What no chat
template needs, such as `lipsum` or `str.translate`, is not there. The clock is looked at with every count, so no signal and no
thread is needed, and a render may stand in a notebook or in any thread.
"""

import re
import types
from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, Sequence, ValuesView
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache, wraps
from itertools import islice
from time import monotonic
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.runtime import Context, markup_join, str_join
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, pass_context, pass_eval_context
from jinja2.visitor import NodeTransformer

SECONDS = 10.0
"""The longest rendering; an ordinary one takes less than a thousandth of it."""

LARGEST = 1 << 24
"""Characters of the largest text, or of all that a list holds."""

ALTOGETHER = 1 << 27
"""Characters and turns of one rendering."""

LONGEST_TEMPLATE = 1 << 18
POINTER = 16
"""A place in a list counts as so many characters."""

MOST_DIGITS = 1000
LONGEST_RANGE = 100_000
"""Jinja's own bound on `range`, here also on the sizes of batches."""

METHODS = frozenset(
    re.findall(
        r"\w+",
        """capitalize casefold center copy count endswith find format format_map get index isalnum isalpha isascii isdecimal isdigit
        isidentifier islower isnumeric isprintable isspace istitle isupper items join keys ljust lower lstrip partition removeprefix
        removesuffix replace rfind rindex rjust rpartition rsplit rstrip split splitlines startswith strip swapcase title upper
        values zfill""",
    )
)
"""The methods of Python's own types that a template may call."""

FILTERS = frozenset(
    re.findall(
        r"\w+",
        """abs attr batch capitalize center count d default dictsort e escape first float forceescape format groupby indent int
        items join last length list lower map max min reject rejectattr replace reverse round safe select selectattr slice sort
        string sum title tojson trim truncate unique upper urlencode wordcount""",
    )
)
"""The filters that a template may use."""

_WIDTH = re.compile(r"\d+")
_NESTED_WIDTH = re.compile(r"%[^a-zA-Z%]*\*|\{[^{}]*\{")
"""A width that is an argument: `%*d` or `{:{}}`."""


class TooMuch(jinja2.TemplateError):
    """A template does more than a chat template may; the message says what."""


@dataclass(slots=True)
class _Budget:
    """What a rendering may still do."""

    until: float
    left: int = ALTOGETHER

    def spend(self, amount: int) -> None:
        """Count; TooMuch where it is used up."""
        self.left -= amount
        if self.left < 0:
            raise TooMuch(
                f"it writes and loops more than {ALTOGETHER:,} characters and turns together"
            )
        if monotonic() > self.until:
            raise TooMuch(f"it takes longer than {SECONDS:g} s")


_BUDGET: ContextVar[_Budget] = ContextVar("_BUDGET")


def render_template(
    template: str, turns: Sequence[Mapping[str, str]], variables: Mapping[str, Any]
) -> str:
    """Return what a chat template writes, to the byte what `apply_chat_template` writes without tools and documents.

    `variables` are the switches and special tokens that the template sees. Raises TooMuch where a bound is passed, and whatever
    else the template raises.
    """
    with _budget():
        return _compiled(template).render(
            messages=list(map(dict, turns)), tools=None, documents=None, **variables
        )


@contextmanager
def _budget() -> Iterator[None]:
    token = _BUDGET.set(_Budget(monotonic() + SECONDS))
    try:
        yield
    finally:
        _BUDGET.reset(token)


@lru_cache(maxsize=64)
def _compiled(template: str) -> jinja2.Template:
    if len(template) > LONGEST_TEMPLATE:
        raise TooMuch(f"it is longer than {LONGEST_TEMPLATE:,} characters")
    from transformers.utils.chat_template_utils import _compile_jinja_template

    return _Environment(_compile_jinja_template("").environment).from_string(template)


class _Environment(ImmutableSandboxedEnvironment):
    """The environment of transformers, in which everything that is made is counted."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, plain: jinja2.Environment) -> None:
        super().__init__(
            trim_blocks=plain.trim_blocks,
            lstrip_blocks=plain.lstrip_blocks,
            extensions=[type(extension) for extension in plain.extensions.values()],
        )
        self.globals = {name: value for name, value in plain.globals.items() if name != "lipsum"}
        self.filters = {name: _counted(name, plain.filters[name]) for name in FILTERS}
        self.filters |= {_MADE: _written, _TURN: _turn, _CONCATENATED: _concatenated}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _Counting().visit(super()._parse(source, name, filename)).set_environment(self)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Apply an operator whose result is not too large."""
        if operator == "*":
            _measure_product(left, right)
            _measure_product(right, left)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            _measure(left.bit_length() * max(right, 0))
        elif operator == "%" and isinstance(left, str | bytes):
            _measure_format(left, right)
        return _made(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call what the template may call."""
        _BUDGET.get().spend(1)
        if isinstance(__obj, types.BuiltinFunctionType):
            if __obj.__name__ == "join":
                args = tuple(map(_listed, args))
            _check_method(__obj, args)
        return _made(super().call(__context, __obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Return `str.format` such that it is measured."""
        plain = super().wrap_str_format(value)
        if plain is None:
            return None

        def measured(*args: Any, **kwargs: Any) -> str:
            _measure_format(value.__self__, (args, kwargs))
            return plain(*args, **kwargs)

        return measured


_MADE, _TURN, _CONCATENATED = " made", " turn", " concatenated"
"""Filters of our own; no template can write a name with a space."""


class _Counting(NodeTransformer):
    """Puts a count at each turn of a loop, and around each list and each text that is put together or written."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        """Count the turns, and what each writes of the template itself."""
        written = sum(
            len(data.data)
            for statement in node.body
            for data in statement.find_all(nodes.TemplateData)
        )
        self.generic_visit(node)
        turn = nodes.Filter(nodes.Const(1 + written), _TURN, [], [], None, None, lineno=node.lineno)
        node.body.insert(0, nodes.ExprStmt(turn, lineno=node.lineno))
        return node

    def visit_Output(self, node: nodes.Output) -> nodes.Output:
        """Count what is written."""
        self.generic_visit(node)
        node.nodes = [
            child if isinstance(child, nodes.TemplateData) else _around(child, _MADE)
            for child in node.nodes
        ]
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Expr:
        """Measure the parts before they are put together."""
        self.generic_visit(node)
        return _around(nodes.List(node.nodes, lineno=node.lineno), _CONCATENATED)

    def visit_List(self, node: nodes.List) -> nodes.Expr:
        """Measure what a list holds: one that holds another twice, and so on, is short and takes forever to write."""
        self.generic_visit(node)
        return _around(node, _MADE)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Expr:
        """Measure what a mapping holds."""
        self.generic_visit(node)
        return _around(node, _MADE)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Expr:
        """Measure what a tuple holds, where it is none of names to be set."""
        self.generic_visit(node)
        return _around(node, _MADE) if node.ctx == "load" else node


def _around(node: nodes.Expr, name: str) -> nodes.Expr:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


@pass_context  # so that it is not done once and for all when the template is compiled
def _turn(context: Context, amount: int) -> str:
    _BUDGET.get().spend(amount)
    return ""


@pass_context
def _written(context: Context, value: Any) -> Any:
    return _made(value)


def _made(value: Any) -> Any:
    """Return a value that was made, measured and counted."""
    _measure(_size(value))
    if isinstance(value, str | bytes):
        _BUDGET.get().spend(len(value))
    elif isinstance(value, list | tuple | dict):
        _BUDGET.get().spend(POINTER * len(value))
    else:
        _BUDGET.get().spend(1)
    return value


@pass_eval_context
def _concatenated(context: nodes.EvalContext, parts: list[Any]) -> str:
    _measure(_size(parts))
    return _made((markup_join if context.autoescape else str_join)(parts))


def _counted(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter with what goes in measured, and what comes out counted."""
    # Jinja passes a filter of this kind the environment or the context before the value.
    first = int(isinstance(plain, types.FunctionType) and "jinja_pass_arg" in vars(plain))

    @wraps(plain)
    def counted(*args: Any, **kwargs: Any) -> Any:
        before, arguments = args[:first], [*args[first:]]
        if name in ("join", "list", "batch", "slice", "sum"):
            arguments[0] = _listed(arguments[0])
        _measure(_size(arguments[0]))
        _check_filter(name, arguments, kwargs)
        return _made(plain(*before, *arguments, **kwargs))

    return counted


def _listed(value: Any) -> Any:
    """Return what comes one by one as a list, which can be measured."""
    return list(islice(value, LARGEST // POINTER)) if isinstance(value, Iterator | range) else value


def _check_filter(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """TooMuch where a filter would multiply what it is given."""
    value, others = args[0], [*args[1:], *kwargs.values()]
    numbers = [abs(number) for number in others if isinstance(number, int)]
    texts = [len(text) for text in others if isinstance(text, str)]
    if name == "center":
        _measure(max(numbers, default=0))
    elif name in ("batch", "slice"):
        _bound(max(numbers, default=0), LONGEST_RANGE, f"{name} of")
    elif name == "round":
        _bound(max(numbers, default=0), MOST_DIGITS, "round to")
    elif name == "indent":
        _measure((_lines(value) + 1) * max([0, *numbers, *texts]))
    elif name == "replace" and len(others) >= 2:
        _measure_replace(str(value), str(others[0]), str(others[1]))
    elif name == "join":
        _measure(_count(value) * max([0, *texts]))
    elif name == "format":
        _measure_format(str(value), others)
    elif name == "tojson":
        widths = (
            sum(numbers)
            + sum(texts)
            + sum(_size(pair) for pair in others if isinstance(pair, list | tuple))
        )
        _measure(_count(value) * widths * _depth(value))
    elif name == "sum" and any(not isinstance(start, int | float | str) for start in others):
        raise TooMuch("it sums what are no numbers")


def _check_method(method: Any, args: Sequence[Any]) -> None:
    """TooMuch where a method of Python's own is not a template's, or would multiply what it is given."""
    owner, name = method.__self__, method.__name__
    if isinstance(owner, types.ModuleType):
        return
    if name not in METHODS:
        raise TooMuch(f"it calls {type(owner).__name__}.{name}, which no chat template needs")
    if name in ("center", "ljust", "rjust", "zfill") and args and isinstance(args[0], int):
        _measure(args[0])
    elif name == "join" and args:
        _measure(_size(args[0]) + _count(args[0]) * len(owner))
    elif (
        name == "replace"
        and len(args) >= 2
        and isinstance(args[0], str)
        and isinstance(args[1], str)
    ):
        _measure_replace(owner, args[0], args[1])


def _measure(size: int) -> None:
    """TooMuch where something would have more characters than the largest text."""
    if size > LARGEST:
        raise TooMuch(f"it makes a text or a list of more than {LARGEST:,} characters")


def _bound(number: int, most: int, what: str) -> None:
    if number > most:
        raise TooMuch(f"{what} more than {most:,}")


def _measure_product(value: Any, times: Any) -> None:
    if isinstance(times, int) and isinstance(value, str | bytes | list | tuple):
        _measure(_size(value) * times)


def _measure_replace(text: str, old: str, new: str) -> None:
    _measure(len(text) + (text.count(old) + 1) * len(new))


def _measure_format(form: str | bytes, args: Any) -> None:
    text = form.decode("latin-1") if isinstance(form, bytes) else form
    if _NESTED_WIDTH.search(text):
        raise TooMuch("it formats with a width that is an argument")
    # More digits than a size has are too many whatever they are.
    width = max(
        (int(digits) if len(digits) < 10 else LARGEST + 1 for digits in _WIDTH.findall(text)),
        default=0,
    )
    _measure((text.count("%") + text.count("{")) * (width + _size(args)) + len(text))


def _size(value: Any) -> int:
    """Return how many characters a value has when it is written, about; no more than one above the largest is counted."""
    if isinstance(value, str | bytes):
        return len(value)
    total, waiting = 0, [value]
    while waiting and total <= LARGEST:
        part = waiting.pop()
        total += POINTER
        if isinstance(part, str | bytes):
            total += len(part)
        elif isinstance(part, int):
            total += part.bit_length() // 3
        elif isinstance(part, list | tuple):
            total += POINTER * len(part)
            waiting += part
        elif isinstance(part, dict):
            total += 2 * POINTER * len(part)
            waiting += [*part.keys(), *part.values()]
        elif isinstance(part, Namespace):
            waiting.append(part._Namespace__attrs)  # type: ignore[attr-defined]
        elif isinstance(part, KeysView | ValuesView | ItemsView):
            waiting += part
    return total


def _count(value: Any) -> int:
    """Return how many values a list holds, with those in its lists; of a text its characters."""
    if isinstance(value, str | bytes):
        return len(value)
    return max(_size(value) // POINTER, 1)


def _depth(value: Any) -> int:
    """Return how many lists are in one another."""
    depth, level = 1, [value]
    while level := [
        inner
        for part in level
        if isinstance(part, dict | list | tuple)
        for inner in (part.values() if isinstance(part, dict) else part)
        if isinstance(inner, dict | list | tuple)
    ]:
        depth += 1
    return depth


def _lines(value: Any) -> int:
    return value.count("\n") if isinstance(value, str) else 0
