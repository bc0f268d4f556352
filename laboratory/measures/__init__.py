"""Ways of measuring, one per file; a reproduction writes the file's name under `measure`.

Each has a `Config` and a function `measure(config, job)` that returns `Results`; `job` is a
`laboratory.study.ReproductionJob`.
"""
