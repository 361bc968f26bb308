"""Loads: a model that is cold and wanted, as whoever waits for it sees it."""
