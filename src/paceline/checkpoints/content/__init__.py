"""What a checkpoint is made of: a tree of values, raw arrays and a user's own files, copied at one moment."""
