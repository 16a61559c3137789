"""Builders, one file a model family."""
