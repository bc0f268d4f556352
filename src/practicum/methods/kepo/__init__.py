"""Second answers with a hint if a whole group fails (KEPO, arXiv 2602.00400)."""

PARTS = {"sources": ["retry"]}
