"""Tests of the signals, one file each."""
