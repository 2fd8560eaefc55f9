"""Engines: sampling from the current weights, with the log-probs of what was sampled. Knows no losses."""
