"""Files: opened, locked, written, journaled and published."""
