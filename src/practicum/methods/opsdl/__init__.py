"""Long texts in which the asked fact is a needle, for OPSDL."""

PARTS = {"tasks": ["needles"]}
