"""Parts of teachers: clients of servers that score, stored answers, other vocabularies."""
