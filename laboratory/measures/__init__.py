"""One file a way of measuring; the file's name is what a reproduction writes under `measure`.

Each has a `Config` and `measure(config, study, form, home, at_once, console)`, which gives the results.
"""
