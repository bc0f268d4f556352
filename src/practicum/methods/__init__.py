"""Published methods that need special code: one folder for each, with its parts.

`PARTS` of a folder has the names of its modules by kind, such as `{"sources": ["replace"]}`. The rest
of practicum finds the modules by these names and never imports them.
"""
