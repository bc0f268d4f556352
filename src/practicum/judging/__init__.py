"""The grades of a judge, and the scorers that learn."""
