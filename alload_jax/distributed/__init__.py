"""The processes of a run: start-up, heartbeat, consensus, key-value store."""
