"""Python objects used as a teacher, a task or a scorer; they are passed to `practicum.distill`.

Each module is a plug-in like the plug-ins of other packages. Its settings hold the object; a saved
recipe holds the object's type and the digest of its code.
"""
