"""What things cost on this machine, as ratios taken side by side in one run: `selfless bench --help`."""
