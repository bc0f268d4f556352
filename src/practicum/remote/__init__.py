"""Clients of other people's servers: JSON over HTTP, and the Tinker API."""
