"""Figures (pure functions of columns) and the widget that streams them to the page."""
