"""Render chat templates, foreign programs, as transformers does, within time and size limits.

A template runs in the sandbox of transformers, which gives it no file and no module. The sandbox
does not stop nested loops and growing texts: `'a' * 10**9`, `x ~ x` again and again,
`'%1000000000d' % 1`. So this module counts each turn of a loop, each call, filter and operator, and
each text that a template writes. It measures an operation that could multiply its input before the
operation runs. Names that no chat template needs, such as `lipsum` or `str.translate`, are missing.
Every count also reads the clock, so no signal and no thread is needed: any thread can render.
"""

import re
import types
from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, Sequence, ValuesView
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache, wraps
from itertools import chain, islice
from time import monotonic
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.runtime import Context, markup_join, str_join
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, pass_context, pass_eval_context
from jinja2.visitor import NodeTransformer

SECONDS = 10.0
"""The longest rendering; an ordinary one takes less than a thousandth of that."""

MAX_CHARACTERS = 1 << 24
"""The characters of the largest text, or of everything that a list holds."""

MAX_WORK = 1 << 27
"""The characters and loop turns of one rendering."""

MAX_TEMPLATE_CHARACTERS = 1 << 18
ITEM_CHARACTERS = 16
"""The characters that an element of a list counts as."""

MAX_DIGITS = 1000
MAX_RANGE = 100_000
"""Jinja's limit on `range`, applied to the sizes of batches too."""

METHODS = frozenset(
    re.findall(
        r"\w+",
        """capitalize casefold center copy count endswith find format format_map get index isalnum
        isalpha isascii isdecimal isdigit isidentifier islower isnumeric isprintable isspace istitle
        isupper items join keys ljust lower lstrip partition removeprefix removesuffix replace rfind
        rindex rjust rpartition rsplit rstrip split splitlines startswith strip swapcase title upper
        values zfill""",
    )
)
"""The methods of built-in types that a template may call."""

FILTERS = frozenset(
    re.findall(
        r"\w+",
        """abs attr batch capitalize center count d default dictsort e escape first float
        forceescape format groupby indent int items join last length list lower map max min reject
        rejectattr replace reverse round safe select selectattr slice sort string sum title tojson
        trim truncate unique upper urlencode wordcount""",
    )
)
"""The filters that a template may use."""

_WIDTH = re.compile(r"\d+")
"""A field width of a format."""

_NESTED_WIDTH = re.compile(r"%[^a-zA-Z%]*\*|\{[^{}]*\{")
"""A field width that is an argument: `%*d` or `{:{}}`."""


class TooMuch(jinja2.TemplateError):
    """A template exceeds a limit; the message says which."""


@dataclass(slots=True)
class _RenderingBudget:
    """The remaining work of a rendering, and its deadline on the monotonic clock."""

    deadline: float
    remaining: int = MAX_WORK

    def count(self, amount: int) -> None:
        """Count some work; raises TooMuch when the budget or the time is used up."""
        self.remaining -= amount
        if self.remaining < 0:
            raise TooMuch(
                f"it writes and loops more than {MAX_WORK:,} characters and turns together"
            )
        if monotonic() > self.deadline:
            raise TooMuch(f"it takes longer than {SECONDS:g} s")


_BUDGET: ContextVar[_RenderingBudget] = ContextVar("_BUDGET")


def render_template(
    template: str,
    turns: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any],
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> str:
    """Render a chat template, byte for byte as `apply_chat_template` without documents.

    `variables` are the switches and special tokens that the template sees. Raises TooMuch if the
    template exceeds a limit, and any exception that the template itself raises.
    """
    token = _BUDGET.set(_RenderingBudget(monotonic() + SECONDS))
    try:
        return _compile(template).render(
            messages=list(map(dict, turns)), tools=tools, documents=None, **variables
        )
    finally:
        _BUDGET.reset(token)


@lru_cache(maxsize=64)
def _compile(template: str) -> jinja2.Template:
    if len(template) > MAX_TEMPLATE_CHARACTERS:
        raise TooMuch(f"it is longer than {MAX_TEMPLATE_CHARACTERS:,} characters")
    from transformers.utils.chat_template_utils import _compile_jinja_template

    return _CountingEnvironment(_compile_jinja_template("").environment).from_string(template)


class _CountingEnvironment(ImmutableSandboxedEnvironment):
    """The environment of transformers, which counts every value that a template makes."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, plain: jinja2.Environment) -> None:
        super().__init__(
            trim_blocks=plain.trim_blocks,
            lstrip_blocks=plain.lstrip_blocks,
            extensions=[type(extension) for extension in plain.extensions.values()],
        )
        self.globals = {name: entry for name, entry in plain.globals.items() if name != "lipsum"}
        self.filters = {name: _limit_filter(name, plain.filters[name]) for name in FILTERS}
        self.filters |= {
            _COUNT_VALUE: _filter_value,
            _COUNT_TURN: _filter_turn,
            _CONCATENATE: _filter_concatenation,
        }

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _CountInserter().visit(super()._parse(source, name, filename)).set_environment(self)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Apply an operator after checking the size of its result."""
        if operator == "*":
            _measure_product(left, right)
            _measure_product(right, left)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            _check_size(left.bit_length() * max(right, 0))
        elif operator == "%" and isinstance(left, str | bytes):
            _measure_format(left, right)
        return _count_value(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function or method that the template may call."""
        _BUDGET.get().count(1)
        if isinstance(__obj, types.BuiltinFunctionType):
            if __obj.__name__ == "join":
                args = tuple(map(_collect_iterator, args))
            _check_method(__obj, args)
        return _count_value(super().call(__context, __obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Return `str.format` with a check of the size of its result."""
        plain = super().wrap_str_format(value)
        if plain is None:
            return None

        def limit_format(*args: Any, **kwargs: Any) -> str:
            _measure_format(value.__self__, (args, kwargs))
            return plain(*args, **kwargs)

        return limit_format


_COUNT_VALUE, _COUNT_TURN, _CONCATENATE = " count value", " count turn", " concatenate"
"""The filters that `_CountInserter` inserts; no template can write a name with a space."""


class _CountInserter(NodeTransformer):
    """Insert a count into each turn of a loop, and around each list and each text."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        """Count the turns, and the characters of the template that each turn writes."""
        characters = sum(
            len(text.data)
            for statement in node.body
            for text in statement.find_all(nodes.TemplateData)
        )
        self.generic_visit(node)
        turn = _wrap(nodes.Const(1 + characters, lineno=node.lineno), _COUNT_TURN)
        node.body.insert(0, nodes.ExprStmt(turn, lineno=node.lineno))
        return node

    def visit_Output(self, node: nodes.Output) -> nodes.Output:
        """Count the values that the template writes."""
        self.generic_visit(node)
        node.nodes = [
            child if isinstance(child, nodes.TemplateData) else _wrap(child, _COUNT_VALUE)
            for child in node.nodes
        ]
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Expr:
        """Measure the parts before they are concatenated."""
        self.generic_visit(node)
        return _wrap(nodes.List(node.nodes, lineno=node.lineno), _CONCATENATE)

    def visit_List(self, node: nodes.List | nodes.Dict | nodes.Tuple) -> nodes.Expr:
        """Measure the contents of a list, a mapping or a tuple."""
        # Lists nested in lists, each twice, are short as objects but grow exponentially when they
        # are written as text.
        self.generic_visit(node)
        is_assigned = isinstance(node, nodes.Tuple) and node.ctx != "load"
        return node if is_assigned else _wrap(node, _COUNT_VALUE)

    visit_Dict = visit_Tuple = visit_List


def _wrap(node: nodes.Expr, name: str) -> nodes.Expr:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


# A filter that takes the context is not folded into a constant when jinja compiles the template.
@pass_context
def _filter_turn(context: Context, amount: int) -> str:
    _BUDGET.get().count(amount)
    return ""


@pass_context
def _filter_value(context: Context, value: Any) -> Any:
    return _count_value(value)


@pass_eval_context
def _filter_concatenation(context: nodes.EvalContext, parts: list[Any]) -> str:
    _check_size(_measure(parts))
    return _count_value((markup_join if context.autoescape else str_join)(parts))


def _count_value(result: Any) -> Any:
    """Return a value after checking its size and counting it."""
    _check_size(_measure(result))
    if isinstance(result, str | bytes):
        _BUDGET.get().count(len(result))
    elif isinstance(result, list | tuple | dict):
        _BUDGET.get().count(ITEM_CHARACTERS * len(result))
    else:
        _BUDGET.get().count(1)
    return result


def _limit_filter(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter that checks the size of its input and counts its output."""
    # Jinja passes a filter of this kind the environment or the context before the value.
    first = int(isinstance(plain, types.FunctionType) and "jinja_pass_arg" in vars(plain))

    @wraps(plain)
    def run_filter(*args: Any, **kwargs: Any) -> Any:
        context, arguments = args[:first], [*args[first:]]
        if name in ("join", "list", "batch", "slice", "sum"):
            arguments[0] = _collect_iterator(arguments[0])
        _check_size(_measure(arguments[0]))
        _check_filter(name, arguments, kwargs)
        return _count_value(plain(*context, *arguments, **kwargs))

    return run_filter


def _collect_iterator(value: Any) -> Any:
    """Return an iterator or a range as a list, which can be measured; other values unchanged."""
    if isinstance(value, Iterator | range):
        return list(islice(value, MAX_CHARACTERS // ITEM_CHARACTERS))
    return value


def _check_filter(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise TooMuch if a filter would multiply its input beyond the limits."""
    subject, options = args[0], [*args[1:], *kwargs.values()]
    numbers = [abs(number) for number in options if isinstance(number, int)]
    texts = [len(text) for text in options if isinstance(text, str)]
    if name == "center":
        _check_size(max(numbers, default=0))
    elif name in ("batch", "slice"):
        _limit(max(numbers, default=0), MAX_RANGE, f"{name} of")
    elif name == "round":
        _limit(max(numbers, default=0), MAX_DIGITS, "round to")
    elif name == "indent":
        lines = subject.count("\n") if isinstance(subject, str) else 0
        _check_size((lines + 1) * max([0, *numbers, *texts]))
    elif name == "replace" and len(options) >= 2:
        _measure_replace(str(subject), str(options[0]), str(options[1]))
    elif name == "join":
        _check_size(_count(subject) * max([0, *texts]))
    elif name == "format":
        _measure_format(str(subject), options)
    elif name == "tojson":
        widths = (
            sum(numbers)
            + sum(texts)
            + sum(_measure(pair) for pair in options if isinstance(pair, list | tuple))
        )
        _check_size(_count(subject) * widths * _measure_depth(subject))
    elif name == "sum" and any(not isinstance(start, int | float | str) for start in options):
        raise TooMuch("it sums what are no numbers")


def _check_method(method: Any, args: Sequence[Any]) -> None:
    """Raise TooMuch if a template may not call a method, or if it would multiply its input."""
    owner, name = method.__self__, method.__name__
    if isinstance(owner, types.ModuleType):
        return
    if name not in METHODS:
        raise TooMuch(f"it calls {type(owner).__name__}.{name}, which no chat template needs")
    if name in ("center", "ljust", "rjust", "zfill") and args and isinstance(args[0], int):
        _check_size(args[0])
    elif name == "join" and args:
        _check_size(_measure(args[0]) + _count(args[0]) * len(owner))
    elif (
        name == "replace"
        and len(args) >= 2
        and isinstance(args[0], str)
        and isinstance(args[1], str)
    ):
        _measure_replace(owner, args[0], args[1])


def _check_size(characters: int) -> None:
    """Raise TooMuch if a value would have more characters than the largest text."""
    if characters > MAX_CHARACTERS:
        raise TooMuch(f"it makes a text or a list of more than {MAX_CHARACTERS:,} characters")


def _limit(number: int, maximum: int, what: str) -> None:
    if number > maximum:
        raise TooMuch(f"{what} more than {maximum:,}")


def _measure_product(value: Any, times: Any) -> None:
    if isinstance(times, int) and isinstance(value, str | bytes | list | tuple):
        _check_size(_measure(value) * times)


def _measure_replace(text: str, old: str, new: str) -> None:
    _check_size(len(text) + (text.count(old) + 1) * len(new))


def _measure_format(form: str | bytes, args: Any) -> None:
    text = form.decode("latin-1") if isinstance(form, bytes) else form
    if _NESTED_WIDTH.search(text):
        raise TooMuch("it formats with a width that is an argument")
    # A width of ten digits or more exceeds the limit, and `int` would be slow for a million digits.
    width = max(
        (
            int(digits) if len(digits) < 10 else MAX_CHARACTERS + 1
            for digits in _WIDTH.findall(text)
        ),
        default=0,
    )
    _check_size((text.count("%") + text.count("{")) * (width + _measure(args)) + len(text))


def _measure(value: Any) -> int:
    """Return about the number of characters that a value writes; counting stops at the limit."""
    if isinstance(value, str | bytes):
        return len(value)
    total, waiting = 0, [value]
    while waiting and total <= MAX_CHARACTERS:
        part = waiting.pop()
        total += ITEM_CHARACTERS
        if isinstance(part, str | bytes):
            total += len(part)
        elif isinstance(part, int):
            total += part.bit_length() // 3
        elif isinstance(part, list | tuple):
            total += ITEM_CHARACTERS * len(part)
            waiting += part
        elif isinstance(part, dict):
            total += 2 * ITEM_CHARACTERS * len(part)
            waiting += [*part.keys(), *part.values()]
        elif isinstance(part, Namespace):
            waiting.append(part._Namespace__attrs)  # type: ignore[attr-defined]
        elif isinstance(part, KeysView | ValuesView | ItemsView):
            waiting += part
    return total


def _count(value: Any) -> int:
    """Return the number of values in a list and its lists, or of characters in a text."""
    if isinstance(value, str | bytes):
        return len(value)
    return max(_measure(value) // ITEM_CHARACTERS, 1)


def _measure_depth(value: Any) -> int:
    """Return the number of levels of lists within lists."""
    depth, level = 0, [value]
    while level:
        depth += 1
        containers = [part for part in level if isinstance(part, dict | list | tuple)]
        children = [part.values() if isinstance(part, dict) else part for part in containers]
        level = [
            child
            for child in chain.from_iterable(children)
            if isinstance(child, dict | list | tuple)
        ]
    return depth
