"""Objects of Python in the place of a teacher, a task or a scorer; `practicum.distill` names them.

Each module is a plug-in as another package would write it. Its settings hold the object, and a
saved recipe the object's type and the digest of its code.
"""
