"""Conversations that an expert begins (TCOD, arXiv 2604.24005)."""

PARTS = {"sources": ["turns"]}
