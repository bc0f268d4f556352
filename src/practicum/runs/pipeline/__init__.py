"""A pipeline: stages run in order, and each student starts from the student of an earlier stage.

A recipe file with `stages:` is a pipeline. All stages share the sections beside `stages`. A stage
is an ordinary run in its own folder, and its final student is exported as a model folder for the
stages after it. `practicum.runs.pipeline.runner` runs a pipeline; reading one loads no model
library.
"""

from practicum.runs.pipeline.stages import Pipeline, Stage, load_pipeline_or_recipe, parse_pipeline

__all__ = ["Pipeline", "Stage", "load_pipeline_or_recipe", "parse_pipeline"]
