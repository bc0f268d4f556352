"""Tests of the sources, one file each."""
