"""A run on disk, and back."""
