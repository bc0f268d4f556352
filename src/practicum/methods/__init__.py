"""Published methods that need special code: one folder per method, with its parts.

`PARTS` of a folder lists the names of its modules by kind, such as `{"sources": ["replace"]}`. The
rest of practicum finds the modules by these names and never imports them.
"""
