"""Who the nodes are: registration, identity, approval, heartbeats, labels."""
