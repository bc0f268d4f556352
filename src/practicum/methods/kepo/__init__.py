"""Second answers with a hint where a whole group fails (KEPO, arXiv 2602.00400)."""

PARTS = {"sources": ["retry"]}
