"""Pure tensor functions: torch only, no classes, no configuration."""
