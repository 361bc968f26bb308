"""What the commands share: output, options, the connection to a fleet, the data folder, and the roles they start."""
