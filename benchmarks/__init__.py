"""What things cost, as ratios taken side by side in one run: `python -m benchmarks --help`."""
