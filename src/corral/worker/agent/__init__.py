"""The worker's dealings with the controller: joining, heartbeats, orders on the bus, leaving."""
