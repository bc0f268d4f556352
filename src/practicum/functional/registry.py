"""Registration of a user's entries: after `register(entry)`, this process's recipes can use it."""

from practicum.functional.advantages import ADVANTAGES, REWARDS, Advantage, RewardRule
from practicum.functional.divergence_entry import DIVERGENCES, Divergence
from practicum.functional.estimators import CORRECTIONS, Correction
from practicum.functional.samples import SAMPLE_WEIGHTS, SampleWeight
from practicum.functional.table import Table
from practicum.functional.weights import WEIGHTS, Weight

AnyEntry = Divergence | Weight | SampleWeight | Correction | Advantage | RewardRule

TABLES: dict[str, tuple[type[AnyEntry], Table]] = {
    "divergence": (Divergence, DIVERGENCES),
    "weight": (Weight, WEIGHTS),
    "sample weight": (SampleWeight, SAMPLE_WEIGHTS),
    "correction": (Correction, CORRECTIONS),
    "advantage": (Advantage, ADVANTAGES),
    "reward": (RewardRule, REWARDS),
}
"""The class of the entries of each kind, and the table in which recipes look up their names."""


def register(entry: AnyEntry) -> AnyEntry:
    """Enter a divergence, weight, sample weight, correction, advantage or reward rule; return it.

    Recipes of this process can then use its name like a built-in name. An entry registered earlier
    under the same name is replaced. Raise ValueError for any other object, or for a built-in name.

        register(Divergence("chi", term, None, "", "Pearson's chi-square"))
        practicum.distill(objective={"divergence": "chi"}, ...)

    Another process, such as the command line, does not know the name: it reads
    `package.module:entry`.
    """
    kinds = ", ".join(cls.__name__ for cls, _ in TABLES.values())
    for cls, table in TABLES.values():
        if isinstance(entry, cls):
            table.register(entry)
            return entry
    raise ValueError(
        f"register takes one of {kinds}, not {entry!r:.80}; for example "
        "register(Divergence('name', term, None, '', 'a summary'))"
    )
