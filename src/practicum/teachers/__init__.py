"""One file a way of scoring; the file's name is the recipe's key."""
