"""Points: what one row of a sweep measures or simulates. Each takes the typed configuration and its own settings."""
