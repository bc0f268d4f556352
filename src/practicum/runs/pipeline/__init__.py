"""A pipeline: stages run in order, each student starting where that of an earlier stage ended.

A recipe file with `stages:` is a pipeline. What stands beside `stages` is shared by all of them. A stage is an ordinary
run in a folder of its own, and its final student is written as a model folder for the stages after it. What runs one is
`practicum.runs.pipeline.running`, so that reading one loads no model library.
"""

from practicum.runs.pipeline.reading import Pipeline, Stage, load_pipeline_or_recipe, parse_pipeline

__all__ = ["Pipeline", "Stage", "load_pipeline_or_recipe", "parse_pipeline"]
