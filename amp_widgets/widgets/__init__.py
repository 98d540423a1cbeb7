"""ipywidgets controls and panels: each renders a state and emits requests."""
