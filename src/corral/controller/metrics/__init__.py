"""What Prometheus reads from a controller: the state of the fleet, and counts by model, node and key."""
