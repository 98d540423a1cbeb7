"""Functions of a live loop, on demand: never on the step's path."""
