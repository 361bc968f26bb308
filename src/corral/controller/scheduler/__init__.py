"""Where a replica should live, which one has to give way, how many there should be: pure decisions, each explained."""
