"""Whoever executes the collectives that a session asks for."""
