"""Installs models from anywhere: reads what a source has, chooses a quantisation for the fleet, derives a
definition."""
