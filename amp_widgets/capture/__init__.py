"""The session around an unmodified loop: watching, without a change to the code, what it does."""
