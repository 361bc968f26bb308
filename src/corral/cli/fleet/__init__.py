"""Commands about the fleet as a whole: its file, keys, requests, logs, decisions, contexts and database."""
