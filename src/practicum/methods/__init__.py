"""Published methods that need code of their own: one folder for each, with its parts.

`PARTS` of a folder has the names of its modules by kind, such as `{"sources": ["replace"]}`. The rest
of practicum finds them by that and imports none of them.
"""
