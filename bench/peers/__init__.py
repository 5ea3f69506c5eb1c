"""Drivers for other people's VMMs: each boots a guest, saves it, and says how to restore it."""
