"""Rows and traces in; tables and figures out."""
