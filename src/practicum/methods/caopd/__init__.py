"""The confidence that the student's success warrants, stated again (CaOPD, arXiv 2604.16830)."""

PARTS = {"sources": ["restate"], "notes": ["rate"]}
