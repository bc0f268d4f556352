"""Filling of templates with `{field}` placeholders: what fills one is data and never a template."""

import re
from collections.abc import Mapping

_PLACEHOLDER = re.compile(r"\{([^{}]*)\}")


def list_placeholders(template: str) -> list[str]:
    """Return the names of a template's placeholders, in order."""
    return _PLACEHOLDER.findall(template)


def fill_placeholders(template: str, fields: Mapping[str, str]) -> str:
    """Replace each `{field}` once, so that braces in a field's text stay text."""
    return _PLACEHOLDER.sub(lambda match: fields[match.group(1)], template)
