"""Data sources: one module per published data set."""
