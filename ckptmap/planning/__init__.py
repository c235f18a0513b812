"""From a checkpoint and `--to` to a Plan, from headers alone."""
