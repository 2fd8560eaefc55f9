"""Models: loading, prompts to tokens, log-probs and entropies. Knows no losses."""
