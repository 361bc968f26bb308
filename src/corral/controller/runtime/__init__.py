"""What every other part of the controller stands on: leadership, the change feed, presence, housekeeping."""
