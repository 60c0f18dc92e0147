"""What a config needs before anything runs: memory, operations, images a second."""
