"""A run for others: a page, a picture, tables, and the files of other tools."""
