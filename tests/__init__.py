"""Tests mirror the package; ``tests/support`` holds what they share."""
