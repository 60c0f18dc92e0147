"""Commands of the launcher: thin, flags -> build -> call."""
