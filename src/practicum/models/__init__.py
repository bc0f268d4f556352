"""Models: their settings in a recipe, the location of their files, and the files' digests."""
