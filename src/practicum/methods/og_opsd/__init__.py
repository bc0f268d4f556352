"""A prefix of each answer, cut by the teacher's summed entropy (OG-OPSD, arXiv 2610.05070)."""

PARTS: dict[str, list[str]] = {}
