"""Plans: memory, FLOPs and speed of a config before it runs."""
