"""One script per question, run as `python -m experiments.NAME --help`; README.md is the index."""
