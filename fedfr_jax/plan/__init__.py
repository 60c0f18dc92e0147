"""Plans: memory, operations and speed of a config before it runs."""
