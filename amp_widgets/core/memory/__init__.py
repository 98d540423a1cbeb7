"""Memory of a training step, measured."""
