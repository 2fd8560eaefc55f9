"""A run as it stands on the disk and as it is watched: folder, checkpoints, figures, onlookers."""
