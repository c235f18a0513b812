"""Values and arithmetic that the other packages share; nothing here reads or writes a file."""
