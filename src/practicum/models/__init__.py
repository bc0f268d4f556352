"""Descriptions and files of models: what a recipe says of one, where its files are, and their digests."""
