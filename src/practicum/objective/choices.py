"""Define the choices of a term that are entries of a table of `practicum.functional`.

Each is written as a name or a call, such as `jsd(0.3)`, and read back from its own text.
"""

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from pydantic import BeforeValidator

from practicum.functional.registry import TABLES
from practicum.objective.entries import Choice, read_entry


@dataclass(frozen=True, slots=True)
class EntrySchema:
    """The JSON Schema of an entry of a table: its name, a call, or a mapping by `type`.

    It is built on request, so that it includes entries registered later.
    """

    kind: str

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        """Return the schema."""
        call = {"type": "string", "pattern": r"^\s*[A-Za-z_][\w.:]*\s*\("}
        dotted = {"type": "string", "pattern": r"^[A-Za-z_]\w*([.:][A-Za-z_]\w*)+$"}
        mapping = {"type": "object", "properties": {"type": {"type": "string"}}}
        names = {"enum": TABLES[self.kind][1].list_names()}
        return {"anyOf": [names, call, dotted, mapping | {"required": ["type"]}]}


DivergenceChoice = Annotated[
    Choice, BeforeValidator(partial(read_entry, "divergence")), EntrySchema("divergence")
]
CorrectionChoice = Annotated[
    Choice, BeforeValidator(partial(read_entry, "correction")), EntrySchema("correction")
]
RewardChoice = Annotated[
    Choice, BeforeValidator(partial(read_entry, "reward")), EntrySchema("reward")
]
WeightChoice = Annotated[
    Choice, BeforeValidator(partial(read_entry, "weight")), EntrySchema("weight")
]
SampleWeightChoice = Annotated[
    Choice, BeforeValidator(partial(read_entry, "sample weight")), EntrySchema("sample weight")
]
