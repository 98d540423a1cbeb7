"""The live loop and its parts: torch, numpy and the standard library only."""
