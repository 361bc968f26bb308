"""What the fleet did, minute by minute: counted from receipts, measured at nodes, kept for 30 days, read as series."""
