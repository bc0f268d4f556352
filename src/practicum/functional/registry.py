"""Registered entries of the user's: `register(entry)` makes a name that recipes of this process use."""

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
"""The class of the entries of each kind, and the table that recipes look their names up in."""


def register(entry: AnyEntry) -> AnyEntry:
    """Enter a divergence, weight, sample weight, correction, advantage or reward rule; return it.

    Recipes of this process then use its name, as those of practicum. An entry that was registered
    before is replaced. Raise ValueError for anything else, or for a name of practicum's own.

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
        f"register takes one of {kinds}, not {entry!r:.80}; write for example "
        "register(Divergence('name', term, None, '', 'a summary'))"
    )
