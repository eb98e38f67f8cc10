"""The qsvc command: one file per command."""
