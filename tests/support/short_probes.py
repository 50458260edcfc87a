"""Imported first by a search's child processes in tests: their probes copy little."""

from tests.support.short_series import shorten

shorten(setattr, with_searches=False)
