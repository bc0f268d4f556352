"""Teachers: one file for each way of scoring, named as in a recipe."""
